"""In bf16 the drop-in and an attached model answer as plain `generate` does, but for near-ties, in every way to generate.

How far answers may part is what the reference itself does: in fp32 on the same weights, behind more padding, or under
another attention of transformers' own. Ours agree with it at least as long as the one of these that parts first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ktransformer2.integrations.attach import attach
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.models.registry import ATTENTION_NAME
from tests.integrations.answers import BLOCK, FOUR_BEAMS, SAMPLED, WITHOUT_SDPA, Inputs, draw, generated, small

FAMILIES = ("llama", "mistral", "gemma2")  # the last two with sliding windows
KNOBS: dict[str, Any] = {"kv": "full", "memory": "64MB", "block_tokens": BLOCK}
Rows = list[list[int]]


@dataclass(frozen=True)
class Way:
    """Settings of `generate`, and the prompts of one call after another."""

    settings: dict[str, Any] = field(default_factory=dict)
    calls: int = 8
    rows: int = 1
    pads: tuple[int, ...] = ()

    def inputs(self) -> list[Inputs]:
        return [draw(self.rows, 45, seed, self.pads) for seed in range(self.calls)]

    def answers(self, model: PreTrainedModel, cache: Callable[[], Any] = lambda: None, padding: int = 0) -> Rows:
        rows: Rows = []
        for inputs in self.inputs():
            wider = {name: torch.nn.functional.pad(value, (padding, 0)) for name, value in inputs.items()}
            rows += generated(model, wider, cache(), **self.settings)[:, padding:].tolist()
        return rows


WAYS: dict[str, Callable[[str], Way]] = {
    "greedy": lambda _: Way(),
    "beams": lambda _: Way(FOUR_BEAMS),
    "assisted": lambda family: Way({"assistant_model": small(family, num_hidden_layers=2, dtype=torch.bfloat16)}),
    "sampled": lambda _: Way(SAMPLED),
    "padded": lambda _: Way(calls=1, rows=8, pads=(0, 3, 7, 12, 1, 30, 44, 20)),
}


def reference_and_others(family: str, way: Way) -> tuple[Rows, list[Rows]]:
    """The answers of transformers, and those of the same weights whose sums are rounded otherwise."""
    reference = small(family, dtype=torch.bfloat16)
    exact = copy.deepcopy(reference)
    torch.nn.Module.to(exact, torch.float32)
    others = [way.answers(exact), way.answers(reference, padding=5)]
    if family not in WITHOUT_SDPA:
        others.append(way.answers(small(family, dtype=torch.bfloat16, attention="sdpa")))
    return way.answers(reference), others


def difference(one: list[int], other: list[int]) -> int:
    """The first place where two answers differ; behind both where they do not."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def agreed(one: Rows, other: Rows) -> int:
    """Tokens, the prompts' too, up to the first difference of each answer."""
    return sum(difference(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_but_for_near_ties(family: str, name: str) -> None:
    way = WAYS[name](family)
    expected, others = reference_and_others(family, way)
    least = min(agreed(other, expected) for other in others)
    paged = small(family, dtype=torch.bfloat16, attention=ATTENTION_NAME)
    found = way.answers(paged, lambda: DynamicKVCache(paged.config, **KNOBS))
    assert agreed(found, expected) >= least
    bare = small(family, dtype=torch.bfloat16)
    with attach(bare, **KNOBS) as held:
        for call in ("cold", "warm"):
            assert agreed(way.answers(bare), expected) >= least, call
        assert held.usage.cached_tokens
        assert held.num_plain_calls == 0
