"""Attention alone: the kernel against torch, against the memory it has to read, and int8 pages against full ones.

`query`: one decode query over 32k tokens in one layer, H32 KV8 D128, random data; also with a kernel that calls for no
page ahead. Rivals, all on the same rows in contiguous tensors made beforehand:
    sdpa_masked_bf16  SDPA with an explicit mask and heads repeated beforehand, its fast path
    sdpa_bf16, sdpa_fp32  SDPA with grouped heads and no mask, what a model without a mask gets
    grouped_bmm       two batched matmuls over grouped heads in bf16, the fair torch rival
    read              a plain read of a buffer larger than any cache: the bandwidth of the same rounds

`steps`: prefill and decode of SmolLM2's shape, see `attention_steps`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from ktransformer2.bench.attention_steps import decode_figures, prefill_figures
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.rounds import interleaved, ratio, spread
from ktransformer2.bench.shapes import block_bytes, geometry
from ktransformer2.bench.threads import torch_threads
from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.kernels.attention import paged_attention, seal, store_kv, without_prefetch
from ktransformer2.kernels.batch import AttentionParams, KVBatch
from ktransformer2.layout import Form, unpack_page

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
FULL_TOKENS, QUICK_TOKENS = 32_768, 4_096
THREADS = 2
PARTS = ("query", "steps")
STEP_TOKENS, QUICK_STEP_TOKENS = 8_000, 1_000
_PREFILL_TOKENS = 4_096
_READ_BYTES = 512 * 2**20
_RIVALS = ("sdpa_masked_bf16", "sdpa_fp32", "sdpa_bf16", "grouped_bmm")


@dataclass(frozen=True)
class Rows:
    """Random rows, bf16: q [1, H, D]; k and v [T, G, D], the last of them the query's own."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def drawn(cls, num_tokens: int, seed: int) -> Rows:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).bfloat16()

        return cls(
            draw(1, HEADS, HEAD_SIZE), draw(num_tokens, KV_HEADS, HEAD_SIZE), draw(num_tokens, KV_HEADS, HEAD_SIZE)
        )

    @property
    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [1, H, 1, D], k and v [1, G, T, D], as torch's attention takes them."""
        return (
            self.q[:, :, None],
            self.k.transpose(0, 1)[None].contiguous(),
            self.v.transpose(0, 1)[None].contiguous(),
        )


def _written(cache: KVCache, rows: Rows) -> tuple[BlockTable, KVBatch]:
    """A table that holds all rows but the query's own, and the batch of the step that adds it."""
    table, past = cache.new_table(), len(rows.k) - 1
    for start in range(0, past, _PREFILL_TOKENS):
        stop = min(start + _PREFILL_TOKENS, past)
        assert cache.allocate(table, stop - start), f"no room for {stop} tokens"
        (batch,) = cache.prepare([(table, stop - start)])
        store_kv(rows.k[start:stop], rows.v[start:stop], batch, 0)
        seal(rows.k[start:stop], rows.v[start:stop], batch, 0)
        cache.publish(table, list(range(start, stop)))
    assert cache.allocate(table, 1), "no room for the query's own row"
    (batch,) = cache.prepare([(table, 1)])
    store_kv(rows.k[past:], rows.v[past:], batch, 0)
    seal(rows.k[past:], rows.v[past:], batch, 0)
    return table, batch


def _scattered(batch: KVBatch, seed: int) -> KVBatch:
    """The same blocks in a random order; the last, which holds the query, stays."""
    order = torch.randperm(len(batch.entries) - 1, generator=torch.Generator().manual_seed(seed))
    entries = torch.cat([batch.entries[order], batch.entries[-1:]]).contiguous()
    return dataclasses.replace(batch, entries=entries)


def _adjacent_share(batch: KVBatch, step_bytes: int) -> float:
    """Share of successive sealed blocks that lie one behind the other in memory."""
    addresses = [unpack_page(entry)[0] for entry in batch.page_table[batch.entries[:, 0], 0].tolist()]
    sealed = [address for address in addresses if address]
    pairs = list(pairwise(sealed))
    return sum(after - before == step_bytes for before, after in pairs) / len(pairs)


def _read(buffer: torch.Tensor) -> Callable[[], object]:
    """A read of every byte by all threads: a sum of 64-bit words, which costs less than the memory does."""
    return lambda: buffer.sum()


def _rivals(rows: Rows) -> dict[str, Callable[[], torch.Tensor]]:
    q, k, v = rows.contiguous
    group, scale = HEADS // KV_HEADS, HEAD_SIZE**-0.5
    repeated_k, repeated_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = torch.zeros(1, 1, 1, k.shape[2], dtype=q.dtype)
    q32, k32, v32 = q.float(), k.float(), v.float()
    grouped_q, grouped_k, grouped_v = q.view(KV_HEADS, group, HEAD_SIZE), k[0].transpose(1, 2), v[0]

    def grouped_bmm() -> torch.Tensor:
        scores = torch.bmm(grouped_q, grouped_k).mul_(scale)  # [G, H/G, T]
        return torch.bmm(torch.softmax(scores, -1), grouped_v)

    return {
        "sdpa_masked_bf16": lambda: sdpa(q, repeated_k, repeated_v, attn_mask=mask),
        "sdpa_fp32": lambda: sdpa(q32, k32, v32, enable_gqa=True),
        "sdpa_bf16": lambda: sdpa(q, k, v, enable_gqa=True),
        "grouped_bmm": grouped_bmm,
    }


def _max_rel_error(output: torch.Tensor, rows: Rows) -> float:
    """Norm of the difference over norm of the fp64 reference, per head, the largest."""
    q, k, v = (tensor.double() for tensor in rows.contiguous)
    exact = sdpa(q, k, v, enable_gqa=True)[0, :, 0]  # [H, D]
    return float(((output[0].double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def run(options: BenchOptions) -> Outcome:
    """Int8 attention of one query against torch and the read bandwidth; that of whole steps against full pages."""
    rows: list[dict[str, object]] = []
    summary: dict[str, float] = {}
    configuration: dict[str, object] = {"threads": THREADS, "dtype": "bf16"}
    with torch_threads(THREADS):
        if options.wants("query"):
            query = _query(options)
            rows, summary, configuration = query.rows, query.summary, configuration | query.configuration
        if options.wants("steps"):
            tokens, rounds = (QUICK_STEP_TOKENS, 3) if options.quick else (STEP_TOKENS, 9)
            for figures in (
                decode_figures(tokens, 3 * rounds, options.seed),
                prefill_figures(tokens, rounds, options.seed),
            ):
                rows, summary = rows + figures.rows, summary | figures.summary
    return Outcome(rows, summary, configuration)


def _query(options: BenchOptions) -> Outcome:
    num_tokens, rounds = (QUICK_TOKENS, 5) if options.quick else (FULL_TOKENS, 30)
    say(f"writing {num_tokens:,} tokens")
    rows = Rows.drawn(num_tokens, options.seed)
    cache = KVCache(geometry(1, KV_HEADS, HEAD_SIZE, num_tokens), CacheConfig())
    table, batch = _written(cache, rows)
    scattered = _scattered(batch, options.seed)
    params = AttentionParams(scale=1 / math.sqrt(HEAD_SIZE))
    own = rows.k[-1:], rows.v[-1:]
    output = paged_attention(rows.q, *own, batch, 0, params)
    page = block_bytes(cache.geometry.groups[0], Form.INT8, cache.config.block_tokens)
    buffer = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    contenders: dict[str, Callable[[], object]] = {
        "int8": lambda: paged_attention(rows.q, *own, batch, 0, params),
        "int8_scattered": lambda: paged_attention(rows.q, *own, scattered, 0, params),
        "int8_no_prefetch": without_prefetch()(lambda: paged_attention(rows.q, *own, batch, 0, params)),
        "read": _read(buffer),
        **_rivals(rows),
    }
    say(f"{rounds} rounds of {', '.join(contenders)}")
    seconds = interleaved(contenders, rounds, options.seed)
    page_bytes = (len(batch.entries) - 1) * page
    share = spread([page_bytes / a / (_READ_BYTES / b) for a, b in zip(seconds["int8"], seconds["read"], strict=True)])
    summary = {
        "int8_bandwidth_share": share.median,
        **{f"int8_vs_{rival}": ratio(seconds[rival], seconds["int8"]).median for rival in _RIVALS},
        "kernel_prefetch_gain": ratio(seconds["int8_no_prefetch"], seconds["int8"]).median,
        "max_rel_error": _max_rel_error(output, rows),
        "contiguous_vs_scattered": ratio(seconds["int8_scattered"], seconds["int8"]).median,
        "adjacent_share": _adjacent_share(batch, page),
    }
    table_rows = [_row(name, values, seconds["int8"]) for name, values in seconds.items()]
    table_rows.append({"part": "int8 bandwidth share of a plain read", **share.as_row("share")})
    bandwidth = {"read_gb_s": _READ_BYTES / spread(seconds["read"]).median / 1e9, "int8_page_bytes": page_bytes}
    cache.abandon(table)
    cache.close()
    shape = {"num_tokens": num_tokens, "heads": HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    return Outcome(table_rows, summary, {**shape, "rounds": rounds, **bandwidth})


def _row(name: str, seconds: list[float], ours: list[float]) -> dict[str, object]:
    slower = ratio(seconds, ours)
    return {
        "part": f"one decode query, {HEADS} heads, {KV_HEADS} KV heads of {HEAD_SIZE}",
        "contender": name,
        **spread(seconds).as_row("ms", 1000.0),
        **slower.as_row("times_int8"),
    }
