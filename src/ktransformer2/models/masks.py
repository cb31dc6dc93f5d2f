"""What a model asks of its attention mask: causal, with or without a sliding window, or something that is not served.

Judges the keywords that transformers hands to a mask function. Knows no cache and no layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from ktransformer2.errors import UnsupportedModelError

_LOOKED_AT = 16  # positions: a window and a direction show in so many


def causal_window(request: Mapping[str, Any]) -> int | None:
    """The sliding window of the mask that a model asks for, judged by its first rows; None: all before are seen.

    Raises: UnsupportedModelError where the mask is not causal.
    """
    window: int | None = request.get("local_size")
    positions = torch.arange(min(request["q_length"], _LOOKED_AT))
    query, key, zero = positions[:, None], positions[None, :], torch.zeros((), dtype=torch.long)
    wanted = request["mask_function"](zero, zero, query, key)
    causal = (key <= query) & (key > query - (window or _LOOKED_AT))
    if not torch.equal(wanted.expand_as(causal), causal):
        raise UnsupportedModelError("the model asks for a mask that is not causal (with or without a sliding window)")
    return window


def refuse_overlay(request: Mapping[str, Any], window: int | None) -> None:
    """The model lays something over the causal mask, such as the blocks of an image: all of it is looked at.

    Raises: UnsupportedModelError where it shows or hides any key.
    """
    visible = sdpa_mask(**{**request, "attention_mask": None})  # [B, 1, T, S]
    query = torch.arange(request["q_length"])[:, None] + request.get("q_offset", 0)
    key = torch.arange(request["kv_length"])[None, :] + request.get("kv_offset", 0)
    causal = (key <= query) & (key > query - (window or request["kv_length"] + request["q_length"]))
    if visible is None or not bool((visible == causal).all()):
        raise UnsupportedModelError("the model lays another mask over the causal one, as images need; text is served")
