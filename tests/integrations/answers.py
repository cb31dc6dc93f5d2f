"""Prompts drawn by seed, and answers held against those of transformers with its own DynamicCache.

Where the two differ, other prompts are drawn only if the reference differs from itself too, computed in float64: then a
near-tie was drawn. Anything else is a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from ktransformer2.models.hf import cache_keyword
from tests.models.tiny import VOCAB, tiny

NUM_NEW = 16
BLOCK = 16
WITHOUT_SDPA = ("gemma2", "gpt_oss")
FOUR_BEAMS: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 2}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 1.2}
_MAX_DRAWS = 4

Inputs = dict[str, torch.Tensor]
Answer = Callable[[Inputs], torch.Tensor]


@cache
def shared(family: str, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """A model that tests use together and leave as it was."""
    return small(family, seed=seed, attention=attention)


def small(family: str, **more: Any) -> PreTrainedModel:
    """A model of a test's own; three layers have both kinds of attention where the family has two."""
    return tiny(family, **{"num_hidden_layers": 3, **more})


def gathering(family: str) -> str:
    """The attention of transformers' own that the family has."""
    return "eager" if family in WITHOUT_SDPA else "sdpa"


def draw(rows: int = 1, columns: int = 45, seed: int = 0, pads: tuple[int, ...] = ()) -> Inputs:
    """Random tokens, with `pads[i]` columns of padding on the left of row i."""
    ids = torch.randint(3, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(100 + seed))
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = 0
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: PreTrainedModel, inputs: Inputs, cache: Any = None, **more: Any) -> Any:
    """What `generate` answers, greedy unless told otherwise: ids [B, T], or the dict that `more` asks for. The random
    numbers are the same in every call."""
    settings = {"do_sample": False, "max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "pad_token_id": 0, **more}
    held = {} if cache is None else {cache_keyword(model): cache}
    torch.manual_seed(7)
    generate: Any = model.generate
    return generate(**inputs, **settings, **held)


def assert_same(
    ours: Answer, reference: PreTrainedModel, drawn: Callable[[int], Inputs] = lambda seed: draw(seed=seed), **more: Any
) -> None:
    """`ours` answers as `reference` does; `more`: settings of `generate` that ours was given too."""
    for seed in range(_MAX_DRAWS):
        inputs = drawn(seed)
        expected, found = generated(reference, inputs, **more), ours(inputs)
        if torch.equal(expected, found):
            return
        assert not torch.equal(expected, generated(doubled(reference), inputs, **more)), (
            f"draw {seed}: {found.tolist()} instead of {expected.tolist()}"
        )
    raise AssertionError(f"{_MAX_DRAWS} near-ties in a row")


def doubled(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64."""
    twin = copy.deepcopy(model)
    torch.nn.Module.to(twin, torch.float64)
    return twin
