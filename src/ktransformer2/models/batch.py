"""The flat batch: every sequence's new tokens in one row, as a model takes them. Knows no cache and no request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ktransformer2.kernels.batch import KVBatch
from ktransformer2.layout import ModelGeometry


@dataclass(frozen=True)
class FlatBatch:
    """One step. `token_ids` int64 [T], `positions` int64 [T], `kv` one per layer group, `logit_rows` int64 [N]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv: tuple[KVBatch, ...]
    logit_rows: torch.Tensor


class CausalModel(Protocol):
    """A model that the engine can step. `fingerprint` covers everything that decides what a key or value is."""

    geometry: ModelGeometry
    fingerprint: bytes
    vocab_size: int
    weight_bytes: int

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """Logits fp32 [N, vocab_size] of `batch.logit_rows`. Side effect: K and V are stored in every layer."""
        ...
