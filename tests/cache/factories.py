"""A cache under test, driven without a model: every token's rows are a function of the whole prefix, so that a block
found under a wrong prefix shows itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from ktransformer2.cache.block import RELEASED, BlockTable
from ktransformer2.cache.block_store import BlockStore
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.kernels import attention
from ktransformer2.kernels.pages import sections
from ktransformer2.layout import Form, LayerGroup, ModelGeometry, RopeSpec, unpack_page

_MASK = 2**64 - 1
_FACTOR = 6364136223846793005
FULL_GROUP = LayerGroup((0, 2), num_kv_heads=2, k_head_size=8, v_head_size=16)
WINDOW_GROUP = LayerGroup((1,), num_kv_heads=1, k_head_size=8, v_head_size=8, window=40)
ROPE = RopeSpec((1.0, 0.1, 0.01, 0.001))


def geometry(*groups: LayerGroup, shift_refused: str = "") -> ModelGeometry:
    groups = groups or (FULL_GROUP,)
    return ModelGeometry(groups, Form.FP32, 4096, (ROPE,) * len(groups), shift_refused)


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_cache(*groups: LayerGroup, clock: Any = None, **config: Any) -> KVCache:
    settings: dict[str, Any] = {"memory_bytes": 64 * 2**20, "block_tokens": 16, "kv": "full"} | config
    return KVCache(geometry(*groups), CacheConfig(**settings), b"test model", clock or Clock())


def expected_rows(group: LayerGroup, tokens: Sequence[int], first: int = 0) -> np.ndarray:
    """[len(tokens) - first, L, G, Dk + Dv] fp32 in [-1, 1), from row `first` on: row i depends on tokens[: i + 1] and
    nothing else.

    Its seed is that of the row before times a constant, plus the token, modulo 2^64; all at once as a running sum.
    """
    width = group.num_kv_heads * (group.k_head_size + group.v_head_size) * len(group.layers)
    powers, inverse = _powers(1 << len(tokens).bit_length())
    summed = np.cumsum(inverse[: len(tokens)] * (2 * np.asarray(tokens, np.uint64) + np.uint64(1)))
    seeds = (powers[: len(tokens)] * (summed + np.uint64(hash(group) & _MASK)))[first:]
    mixed = seeds[:, None] + np.arange(width, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    rows = (mixed >> np.uint64(40)).astype(np.float32) / 2**23 - 1
    shape = (len(seeds), len(group.layers), group.num_kv_heads, group.k_head_size + group.v_head_size)
    return rows.reshape(shape)


@cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first powers of the constant, and of what undoes it: [count] uint64 each."""
    both = _FACTOR, pow(_FACTOR, -1, 2**64)
    powers, inverse = (np.cumprod(np.full(count, factor, np.uint64), dtype=np.uint64) for factor in both)
    return powers, inverse


def compute(cache: KVCache, step: Sequence[tuple[BlockTable, Sequence[int]]]) -> None:
    """Store and seal the rows of a step whose room is allocated, then publish it."""
    batches = cache.prepare([(table, len(new)) for table, new in step])
    for group, batch in zip(cache.geometry.groups, batches, strict=True):
        rows = np.concatenate(
            [expected_rows(group, [*table.tokens, *new], table.num_tokens) for table, new in step if len(new)]
        )
        for column in range(len(group.layers)):
            k = torch.from_numpy(rows[:, column, :, : group.k_head_size].copy())
            v = torch.from_numpy(rows[:, column, :, group.k_head_size :].copy())
            attention.store_kv(k, v, batch, column)
            attention.seal(k, v, batch, column)
    for table, new in step:
        cache.publish(table, new)


def append(cache: KVCache, table: BlockTable, tokens: Sequence[int]) -> bool:
    """Allocate and compute `tokens` behind the table. False: no room."""
    if not cache.allocate(table, len(tokens)):
        return False
    compute(cache, [(table, tokens)])
    return True


def start(cache: KVCache, tokens: Sequence[int], salt: bytes = b"") -> BlockTable | None:
    """A table that adopts what the cache holds of `tokens` and computes the rest. None: no room."""
    table, match = cache.new_table(salt), cache.match(tokens, salt)
    if not cache.allocate(table, len(tokens) - match.num_tokens, match):
        return None
    if table.num_tokens < match.num_tokens:  # the partial copy found no room
        cache.abandon(table)
        if not cache.allocate(table, len(tokens) - table.num_tokens):
            cache.release(table)
            return None
    compute(cache, [(table, tokens[table.num_tokens :])])
    return table


def read_rows(cache: KVCache, table: BlockTable, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows [N, L, G, Dk + Dv], held [N]): what later queries would read, or as computed where nothing is sealed."""
    shape, store, p = cache.geometry.groups[group], cache._residency.stores[group], cache.config.block_tokens
    entries = table.groups[group].entries.tolist()
    heads, k_size = shape.num_kv_heads, shape.k_head_size
    blocks = np.zeros((len(entries), p, len(shape.layers), heads, k_size + shape.v_head_size), np.float32)
    for column in range(len(shape.layers)):
        for forms, pages in _pages(store, entries, column).items():
            for section, part in zip(sections(shape, p, *forms), (slice(k_size), slice(k_size, None)), strict=True):
                loaded = section.load(list(pages.values()))  # [G, N * P, D]
                rows = loaded.reshape(heads, len(pages), p, -1)
                blocks[list(pages), :, column, :, part] = rows.permute(1, 2, 0, 3).numpy()
    pieces = [block[first : first + rows] for block, (_, first, rows, _) in zip(blocks, entries, strict=True)]
    held = [block_id != RELEASED for block_id, _, rows, _ in entries for _ in range(rows)]
    return np.concatenate([blocks[:0, 0], *pieces]), np.array(held, bool)


def _pages(store: BlockStore, entries: list[list[int]], column: int) -> dict[tuple[Form, Form], dict[int, int]]:
    """By the forms of their pages: the places of entries, with the addresses of the pages."""
    found: dict[tuple[Form, Form], dict[int, int]] = {}
    for place, (block_id, *_) in enumerate(entries):
        if block_id != RELEASED:
            page = int(store.page_table[block_id, column]) or int(store.open_table[block_id, column])
            address, *forms = unpack_page(page)
            found.setdefault((forms[0], forms[1]), {})[place] = address
    return found


def assert_rows(cache: KVCache, table: BlockTable, tokens: Sequence[int]) -> None:
    """The table holds `tokens`, and its rows are theirs: exactly in full form, within one int8 step otherwise."""
    assert list(table.tokens) == list(tokens)
    assert table.num_tokens == len(tokens)
    for g, group in enumerate(cache.geometry.groups):
        rows, held = read_rows(cache, table, g)
        expected = expected_rows(group, tokens)
        first = 0 if group.window is None else max(0, len(tokens) - group.window + 1)
        assert held[first:].all(), "a visible row was released"
        bound = 0.0 if cache.config.kv == "full" else 1.05 / 254
        assert np.abs(rows - expected)[held].max(initial=0.0) <= bound
