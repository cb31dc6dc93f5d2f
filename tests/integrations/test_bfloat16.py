"""In bfloat16 every way to generate answers as with transformers' own cache, but where the reference is near a tie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ktransformer2.integrations.attach import attach
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.models.registry import ATTENTION_NAME
from tests.integrations.answers import (
    BLOCK,
    FOUR_BEAMS,
    SAMPLED,
    Inputs,
    assert_same_but_for_ties,
    draw,
    gathering,
    generated,
    small,
)

FAMILIES = ("llama", "mistral", "gemma2")  # the last two have sliding windows
PADS = (0, 3, 7, 12, 1, 30, 44, 20)
_HELD: dict[str, Any] = {"kv": "full", "memory": "64MB", "block_tokens": BLOCK}


def looked_up() -> Inputs:
    """A prompt that repeats itself, so that looking up its end proposes tokens."""
    ids = draw(1, 15)["input_ids"].repeat(1, 3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# Name: prompts, settings. "assisted" is given its helper, which is of the same family.
WAYS: dict[str, tuple[Callable[[], Inputs], dict[str, Any]]] = {
    "greedy": (lambda: draw(3), {}),
    "sampled": (lambda: draw(3), SAMPLED),
    "beams": (lambda: draw(2), FOUR_BEAMS),
    "assisted": (draw, {}),
    "looked up": (looked_up, {"prompt_lookup_num_tokens": 6}),
    "padded": (lambda: draw(8, pads=PADS), {}),
}


def half(family: str, **more: Any) -> PreTrainedModel:
    return small(family, dtype=torch.bfloat16, **more)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_drop_in_and_an_attached_model_answer_as_the_bare_one(family: str, way: str) -> None:
    drawn, settings = WAYS[way]
    inputs, settings = drawn(), dict(settings)
    if way == "assisted":
        settings["assistant_model"] = half(family, num_hidden_layers=2)
    ours = half(family, attention=ATTENTION_NAME)
    answers = [generated(ours, inputs, DynamicKVCache(ours.config, **_HELD), **settings)]
    with attach(half(family, attention=gathering(family)), **_HELD) as held:
        for _ in ("cold", "warm"):
            answers.append(generated(held.model, inputs, **settings))
        assert held.usage.cached_tokens > 0
        assert held.num_plain_calls == 0
    assert_same_but_for_ties(answers, half(family), inputs, **settings)
