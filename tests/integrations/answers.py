"""Prompts drawn by seed, and answers held against those of transformers with its own DynamicCache.

Where the two differ, other prompts are drawn only if the reference differs from itself too, computed in float64: then a
near-tie was drawn. Anything else is a fault. In bfloat16, where near-ties are many, each answer is judged by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
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
        assert not torch.equal(expected, generated(widened(reference, torch.float64), inputs, **more)), (
            f"draw {seed}: {found.tolist()} instead of {expected.tolist()}"
        )
    raise AssertionError(f"{_MAX_DRAWS} near-ties in a row")


def assert_same_but_for_ties(
    answers: Sequence[torch.Tensor], reference: PreTrainedModel, inputs: Inputs, **more: Any
) -> None:
    """The rows of each answer are those of `reference`, in bfloat16, or leave them at a near-tie; half of them do not.

    A near-tie: the reference, computed in float32, has left itself by then; or, where the best token is taken, the
    margin in float32 is no wider than what bfloat16 may move both of its tokens.
    """
    exact = widened(reference, torch.float32)
    expected, itself = (generated(model, inputs, **more) for model in (reference, exact))
    takes_best = not {"do_sample", "num_beams"} & set(more)
    for found in answers:
        left = [first_difference(*rows) for rows in zip(expected, found, strict=True)]
        for row, column in enumerate(left):
            if column < min(first_difference(expected[row], itself[row]), expected.shape[1]):
                start = int((inputs["attention_mask"][row] == 0).sum()) if takes_best else 0
                near = takes_best and _is_near_tie(reference, exact, expected[row : row + 1, start:column])
                assert near, f"row {row} differs from column {column} on: {found[row].tolist()}"
        assert 2 * left.count(expected.shape[1]) >= len(left), f"{left}: too many ties to tell anything"


def _is_near_tie(reference: PreTrainedModel, exact: PreTrainedModel, ids: torch.Tensor) -> bool:
    with torch.no_grad():
        rough, fine = (model(input_ids=ids).logits[0, -1].float() for model in (reference, exact))
    best = fine.topk(2).values
    return bool(best[0] - best[1] <= 2 * (rough - fine).abs().max())


def first_difference(one: torch.Tensor, other: torch.Tensor) -> int:
    """The first column where two answers differ; their length where they do not."""
    columns = (one != other).nonzero().flatten().tolist()
    return int(columns[0]) if columns else len(one)


def widened(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights in a wider type."""
    twin = copy.deepcopy(model)
    torch.nn.Module.to(twin, dtype)
    return twin
