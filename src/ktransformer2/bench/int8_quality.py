"""What int8 keys and values change in a model's predictions: teacher-forced on real text, beside model precision.

Both caches read the same windows in the same chunks, so only the form differs. Perplexities are of the next token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.models.batch import CausalModel, FlatBatch

WINDOW_TOKENS = 2048
CHUNKS = (64, 2048)
_ROWS_AT_ONCE = 256


@dataclass
class Quality:
    """Sums over predictions. `kl` in nats, of int8 against full."""

    chunk_tokens: int
    count: int = 0
    kl: float = 0.0
    top1: int = 0
    nll_full: float = 0.0
    nll_int8: float = 0.0

    def add(self, full: torch.Tensor, int8: torch.Tensor, following: torch.Tensor) -> None:
        """Logits [N, vocab] of both, and the tokens [N] that follow."""
        for start in range(0, len(full), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            p, q = full[rows].log_softmax(-1), int8[rows].log_softmax(-1)
            self.kl += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            self.top1 += int((p.argmax(-1) == q.argmax(-1)).sum())
            place = following[rows, None]
            self.nll_full -= float(p.gather(1, place).sum(dtype=torch.float64))
            self.nll_int8 -= float(q.gather(1, place).sum(dtype=torch.float64))
        self.count += len(full)

    @property
    def mean_kl(self) -> float:
        return self.kl / self.count

    @property
    def top1_share(self) -> float:
        return self.top1 / self.count

    @property
    def ppl_ratio(self) -> float:
        return math.exp((self.nll_int8 - self.nll_full) / self.count)

    @property
    def ppl_full(self) -> float:
        return math.exp(self.nll_full / self.count)


class _Reader:
    """One window read into one cache."""

    def __init__(self, model: CausalModel, kv: str) -> None:
        self.model = model
        self.cache = KVCache(model.geometry, CacheConfig(kv=kv), model.fingerprint)
        self.table: BlockTable = self.cache.new_table(publish=False)

    def read(self, chunk: Sequence[int]) -> torch.Tensor:
        """Logits [T, vocab] behind every token of the chunk."""
        assert self.cache.allocate(self.table, len(chunk)), "no room in an empty cache"
        start = self.table.next_position
        kv, rows = self.cache.prepare([(self.table, len(chunk))]), torch.arange(len(chunk))
        logits = self.model.forward(FlatBatch(torch.tensor(chunk), start + rows, kv, rows))
        self.cache.publish(self.table, chunk)
        return logits

    def close(self) -> None:
        self.cache.release(self.table)
        self.cache.close()


def measure(model: CausalModel, windows: Sequence[Sequence[int]], chunk_tokens: int) -> Quality:
    """Every window from an empty cache in chunks of `chunk_tokens`."""
    quality = Quality(chunk_tokens)
    for window in windows:
        full, int8 = _Reader(model, "full"), _Reader(model, "int8")
        for start in range(0, len(window) - 1, chunk_tokens):
            chunk = list(window[start : min(start + chunk_tokens, len(window) - 1)])
            following = torch.tensor(window[start + 1 : start + 1 + len(chunk)])
            quality.add(full.read(chunk), int8.read(chunk), following)
        full.close()
        int8.close()
    return quality


def windows_of(tokens: Sequence[int], count: int) -> list[Sequence[int]]:
    """`count` windows of 2,048 predictions, spread evenly over the text."""
    size = WINDOW_TOKENS + 1
    count = min(count, len(tokens) // size)
    step = (len(tokens) - size) // max(count - 1, 1)
    return [tokens[i * step : i * step + size] for i in range(count)]
