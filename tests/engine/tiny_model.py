"""A real one-layer transformer of 262 tokens, written out: it stores and attends through the cache's own pages.

Products are in fp64 and rounded, so that a row hardly depends on which other rows share the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.engine.detokenizer import Vocabulary
from ktransformer2.engine.engine import Engine
from ktransformer2.kernels.attention import paged_attention, seal, store_kv
from ktransformer2.kernels.batch import AttentionParams
from ktransformer2.layout import Form, LayerGroup, ModelGeometry
from ktransformer2.models.batch import FlatBatch
from tests.engine.byte_tokenizer import END, VOCAB_SIZE, ByteTokenizer

D = 16
POISON = 261  # a step that holds this token has NaN from its row on


class TinyModel:
    """`batches` records what every step held: the token ids of each sequence, in order."""

    def __init__(self, max_positions: int = 2048) -> None:
        group = LayerGroup((0,), num_kv_heads=1, k_head_size=D, v_head_size=D)
        self.geometry = ModelGeometry((group,), Form.FP32, max_positions, (None,))
        self.fingerprint = b"tiny"
        self.vocab_size = VOCAB_SIZE
        self.weight_bytes = 0
        self.batches: list[list[list[int]]] = []
        self.fail_next = False
        draw = torch.Generator().manual_seed(5)

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=draw, dtype=torch.float64)

        self._embedding, self._places = weights(VOCAB_SIZE, D), weights(max_positions, D) / 2
        self._q, self._k, self._v, self._out = weights(D, D), weights(D, D), weights(D, D), weights(D, VOCAB_SIZE)

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        starts = batch.kv[0].query_starts.tolist()
        ids = batch.token_ids.tolist()
        self.batches.append([ids[a:b] for a, b in itertools.pairwise(starts)])
        x = self._embedding[batch.token_ids] + self._places[batch.positions]  # [T, D]
        x[batch.token_ids == POISON] = torch.nan
        q, k, v = ((x @ w).float().unsqueeze(1) for w in (self._q, self._k, self._v))  # [T, 1, D]
        store_kv(k, v, batch.kv[0], 0)
        seal(k, v, batch.kv[0], 0)
        attended = paged_attention(q, k, v, batch.kv[0], 0, AttentionParams(D**-0.5))[:, 0]
        rows = batch.logit_rows
        # Mostly what was attended to: the next token hangs on the whole context, and is not too sure of itself.
        return ((x[rows] / 2 + 2 * attended[rows].double()) @ self._out / 8).float()  # [N, V]

    @property
    def step_sizes(self) -> list[list[int]]:
        """New tokens of each sequence of every step."""
        return [[len(ids) for ids in batch] for batch in self.batches]


class Bench:
    """An engine on a tiny model with a small cache; `num_blocks` of it, where it matters."""

    def __init__(self, *, num_blocks: int = 64, kv: str = "full", max_positions: int = 2048, **config: Any) -> None:
        self.model = TinyModel(max_positions)
        probe = KVCache(self.model.geometry, CacheConfig(kv=kv, block_tokens=16))
        limit = probe.bytes_for(16 * num_blocks - 1) + 3072  # for the block tables of some more sequences: no extent
        probe.close()
        cache_config = CacheConfig(memory_bytes=limit, kv=kv, block_tokens=16, cached_share_ratio=1.0)
        self.now_s = 0.0
        self.cache = KVCache(self.model.geometry, cache_config, self.model.fingerprint, self.clock)
        vocabulary = Vocabulary(ByteTokenizer(), frozenset({END}))
        self.engine = Engine(self.model, self.cache, vocabulary, EngineConfig(**config), self.clock)

    def clock(self) -> float:
        return self.now_s

    def check_integrity(self) -> None:
        self.engine.check_integrity()
        self.cache.check_integrity()

    def close(self) -> None:
        self.engine.close()
        self.cache.close()

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence uses."""
        stats = self.cache.stats()
        return stats.num_blocks - stats.num_cached_blocks


def prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of printable bytes."""
    draw = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(97, 123, (length,), generator=draw).tolist()
    return ids


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [prompt(length, seed) for seed, length in enumerate(lengths)]
