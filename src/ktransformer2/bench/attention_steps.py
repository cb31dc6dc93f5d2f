"""Attention steps of SmolLM2's shape, int8 pages against full ones: a prefill by chunks, a decode over all layers.

Shape: H9 KV3 D64, rows in bf16, random data. Times are those of `store_kv`, `seal` and `paged_attention` alone. A
prefill is one layer; a decode is all 30, so that no page is still in a cache when its turn comes again. Yardsticks of
the same rounds: a plain read of memory for what bytes bind, torch's fp32 matmul for what arithmetic binds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ktransformer2.bench.outcome import say
from ktransformer2.bench.rounds import interleaved, ratio, spread
from ktransformer2.bench.shapes import geometry, token_bytes
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.kernels.attention import paged_attention, seal, store_kv
from ktransformer2.kernels.batch import AttentionParams, KVBatch
from ktransformer2.layout import Form

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 30, 9, 3, 64
CHUNKS = (128, 256, 512, 1024, 2048)
SHORT_CONTEXT = 512
_PARAMS = AttentionParams(scale=HEAD_SIZE**-0.5)
_FORMS = {"int8": Form.INT8, "full": Form.BF16}
_MATMUL_SIZE = 1024
_READ_BYTES = 256 * 2**20


@dataclass(frozen=True)
class StepSeconds:
    """What the three kernels of one layer took, in seconds."""

    store: float
    seal: float
    attention: float

    @property
    def total(self) -> float:
        return self.store + self.seal + self.attention

    def __add__(self, other: StepSeconds) -> StepSeconds:
        return StepSeconds(self.store + other.store, self.seal + other.seal, self.attention + other.attention)


def timed_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int) -> StepSeconds:
    """One layer's kernels on the step's rows."""
    begin = time.perf_counter()
    store_kv(k, v, batch, column)
    stored = time.perf_counter()
    seal(k, v, batch, column)
    sealed = time.perf_counter()
    paged_attention(q, k, v, batch, column, _PARAMS)
    return StepSeconds(stored - begin, sealed - stored, time.perf_counter() - sealed)


class Prefill:
    """Prefills one layer `chunk` tokens at a time into an empty cache; `seconds` has one entry a call."""

    def __init__(self, num_tokens: int, kv: str, chunk: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.num_tokens, self.kv, self.chunk = num_tokens, kv, chunk
        self._q, self._k, self._v = (
            torch.randn(num_tokens, heads, HEAD_SIZE, generator=random).bfloat16()
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.seconds: list[StepSeconds] = []

    def __call__(self) -> None:
        cache = KVCache(geometry(1, KV_HEADS, HEAD_SIZE, self.num_tokens), CacheConfig(kv=self.kv))
        table, taken = cache.new_table(), StepSeconds(0, 0, 0)
        for start in range(0, self.num_tokens, self.chunk):
            stop = min(start + self.chunk, self.num_tokens)
            assert cache.allocate(table, stop - start), f"no room for {stop} tokens"
            (batch,) = cache.prepare([(table, stop - start)])
            taken += timed_step(self._q[start:stop], self._k[start:stop], self._v[start:stop], batch, 0)
            cache.publish(table, list(range(start, stop)))
        cache.abandon(table)
        cache.close()
        self.seconds.append(taken)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the products with K and V, of pairs that see each other alone."""
        return self.num_tokens * (self.num_tokens + 1) // 2 * HEADS * 2 * HEAD_SIZE * 2


class Decode:
    """One new token behind `context` others, through all layers; `bytes` is what its attention reads."""

    def __init__(self, context: int, kv: str, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        shape = geometry(LAYERS, KV_HEADS, HEAD_SIZE, context + 1)
        self.bytes = context * token_bytes(shape.groups[0], _FORMS[kv])
        self._cache = KVCache(shape, CacheConfig(kv=kv))
        table = self._cache.new_table()
        for new in (context, 1):
            q, k, v = (
                torch.randn(new, heads, HEAD_SIZE, generator=random).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            assert self._cache.allocate(table, new), f"no room for {new} tokens"
            (batch,) = self._cache.prepare([(table, new)])
            for column in range(LAYERS):
                store_kv(k, v, batch, column)
                seal(k, v, batch, column)
            if new > 1:
                self._cache.publish(table, list(range(new)))
        self._q, self._k, self._v, self._batch = q, k, v, batch

    def __call__(self) -> None:
        for column in range(LAYERS):
            paged_attention(self._q, self._k, self._v, self._batch, column, _PARAMS)

    def close(self) -> None:
        self._cache.close()


@dataclass(frozen=True)
class Figures:
    """Rows for people and keys for the targets."""

    rows: list[dict[str, object]]
    summary: dict[str, float]


def prefill_figures(num_tokens: int, rounds: int, seed: int) -> Figures:
    """Every chunk size in int8 and the shipped one in full form, beside a matmul in fp32."""
    shipped = EngineConfig().max_step_tokens
    prefills = {f"int8, chunks of {chunk:,}": Prefill(num_tokens, "int8", chunk, seed) for chunk in CHUNKS}
    prefills["full"] = Prefill(num_tokens, "full", shipped, seed)
    a, b = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE, generator=torch.Generator().manual_seed(seed))
    say(f"prefill: {rounds} rounds of {'; '.join(prefills)}")
    contenders: dict[str, Callable[[], object]] = {**prefills, "matmul": lambda: a @ b}
    matmul_rate = [2 * _MATMUL_SIZE**3 / seconds for seconds in interleaved(contenders, rounds, seed)["matmul"]]
    part = f"prefill of {num_tokens:,} tokens in one layer"
    rows: list[dict[str, object]] = []
    for name, prefill in prefills.items():
        taken = prefill.seconds[1:]  # the first call is not counted
        rates = [prefill.operations / seconds.attention for seconds in taken]
        rows.append(
            {
                "part": part,
                "contender": name,
                "store_ms": spread([seconds.store for seconds in taken]).median * 1e3,
                "seal_ms": spread([seconds.seal for seconds in taken]).median * 1e3,
                **spread([seconds.attention for seconds in taken]).as_row("attention_ms", 1e3),
                "gop_s": spread(rates).median / 1e9,
                "times_fp32_matmul": ratio(rates, matmul_rate).median,
            }
        )
    ours, full = prefills[f"int8, chunks of {shipped:,}"].seconds[1:], prefills["full"].seconds[1:]
    rates = [prefills["full"].operations / seconds.attention for seconds in ours]
    summary = {
        "int8_kv_vs_full_kv_ttft_8k": ratio([s.total for s in ours], [s.total for s in full]).median,
        "prefill_vs_fp32_matmul": ratio(rates, matmul_rate).median,
    }
    return Figures(rows, summary)


def decode_figures(context: int, rounds: int, seed: int) -> Figures:
    """int8 and full form behind a short and a long context, beside a plain read of memory."""
    buffer = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    decodes = {
        f"{kv} behind {tokens:,}": Decode(tokens, kv, seed) for tokens in (SHORT_CONTEXT, context) for kv in _FORMS
    }
    say(f"decode: {rounds} rounds of {'; '.join(decodes)}")
    contenders: dict[str, Callable[[], object]] = {**decodes, "read": lambda: buffer.sum()}
    seconds = interleaved(contenders, rounds, seed)
    speed = [_READ_BYTES / taken for taken in seconds["read"]]
    rows: list[dict[str, object]] = [
        {
            "part": f"decode of one token in {LAYERS} layers",
            "contender": name,
            **spread(seconds[name]).as_row("ms", 1e3),
            "bytes": decode.bytes,
            **ratio([decode.bytes / taken for taken in seconds[name]], speed).as_row("read_share"),
        }
        for name, decode in decodes.items()
    ]
    for decode in decodes.values():
        decode.close()
    gain = ratio(seconds[f"full behind {context:,}"], seconds[f"int8 behind {context:,}"])
    return Figures(rows, {"int8_kv_vs_full_kv_decode_8k": gain.median})
