"""Whether a model may be stepped on a flat row: outside attention no token may depend on its neighbours.

In a flat batch a token's neighbours belong to other sequences, and its position is the one it is told. So the same
tokens at the same positions go through the model twice, in another order and among other neighbours, while attention
answers each token with its own value. Convolutions over tokens, recurrent state, and positions that a model counts by
itself change what a token computes. Knows no page and no cache. Side effects: none that last.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ktransformer2.errors import UnsupportedModelError
from ktransformer2.models.registry import LayerCall, Receiver, receiving

_SHARED = 8  # tokens that are in both rows
# Of the median token: rounding may send a single one to another expert.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class _OwnValues:
    """A receiver whose queries see only their own token. Remembers everything that it was handed, in order."""

    def __init__(self) -> None:
        self.handed: list[torch.Tensor] = []  # [T, channels] each

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.handed.append(torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1).float())
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # [T, G, Dv] -> [T, H, Dv]

    def mask(self, request: Mapping[str, Any]) -> None:
        """Masks say nothing about a single token."""


def can_choose_logits(model: PreTrainedModel) -> bool:
    """Whether the model can be asked for the logits of some rows only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def pass_row(
    model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor, receiver: Receiver, num_logits: int
) -> torch.Tensor:
    """One row, tokens [T] at positions [T], sent through the model; logits of at least its last `num_logits` tokens.

    Raises: UnsupportedModelError, also for whatever the model's own code raises.
    """
    few = {"logits_to_keep": num_logits} if can_choose_logits(model) else {}
    try:
        with torch.inference_mode(), receiving(receiver):
            logits: torch.Tensor = model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, **few
            ).logits[0]
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model may raise anything
        raise UnsupportedModelError(
            f"{model.config.model_type} cannot compute a row of tokens at given positions "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
    return logits


def refuse_dependent_rows(model: PreTrainedModel, max_positions: int) -> None:
    """Raises UnsupportedModelError where a token's queries, keys, values or logits depend on what stands beside it."""
    vocab_size = model.get_input_embeddings().get_parameter("weight").shape[0]
    tokens = torch.linspace(0, vocab_size - 1, steps=3 * _SHARED).long().view(_SHARED, 3)
    positions = torch.linspace(0, max_positions - 1, steps=3 * _SHARED).long().view(_SHARED, 3)
    before = _computed(model, tokens[:, [0, 1]], positions[:, [0, 1]])
    after = _computed(model, tokens.flip(0)[:, [2, 0]], positions.flip(0)[:, [2, 0]])
    for one, other in zip(before, after, strict=True):
        here, there = one[0::2], other[1::2].flip(0)  # the shared tokens [_SHARED, channels], in the same order
        distance = (here - there).norm(dim=-1) / here.norm(dim=-1).clamp_min(1e-12)
        if not float(distance.median()) <= _TOLERANCE[model.dtype]:  # NaN too
            raise UnsupportedModelError(
                f"{model.config.model_type}: what a token computes outside attention depends on its neighbours "
                "(a convolution or a state over tokens, or positions that the model counts by itself)"
            )


def _computed(model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """Everything that one row hands to attention, then its logits: [T, channels] each."""
    own = _OwnValues()
    logits = pass_row(model, tokens.flatten(), positions.flatten(), own, num_logits=tokens.numel())
    return [*own.handed, logits.float()]
