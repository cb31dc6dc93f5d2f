"""What sequences take: worked out by hand, equal to what a cache admits, and tight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.sizing import Demand, DemandBytes, demand_bytes, longest_tokens, page_table_rows
from ktransformer2.config import CacheConfig
from ktransformer2.layout import Form, LayerGroup, ModelGeometry

# SmolLM2: 30 layers, 3 KV heads of 64. A block of 64 tokens: 2 x 3 x 64 x 64 elements a layer.
SMOLLM2 = ModelGeometry((LayerGroup(tuple(range(30)), 3, 64, 64),), Form.FP32, 8192, (None,))
FULL_EXTENT = 30 * 2 * 3 * 64 * 64 * 4
INT8_EXTENT = 761_856  # 30 x 2 x (3 x 64 x 64 codes + 3 x 64 scales of 2 bytes), in pages of 4,096
# A window of 100 tokens in one layer, all of them in the other.
HYBRID = ModelGeometry((LayerGroup((0,), 2, 16, 16, 100), LayerGroup((1,), 2, 16, 16)), Form.BF16, 4096, (None, None))


def block_table(num_tokens: int, num_groups: int = 1) -> int:
    return (num_tokens // 64 + 1) * (4 * 64 + 73 + 32 * num_groups)


def test_full_blocks_and_one_that_fills() -> None:
    found = demand_bytes(SMOLLM2, CacheConfig(kv="full"), Demand(1000, 512))
    page_tables = 2 * 64 * 30 * 8
    assert found == DemandBytes((1000 // 64 + 1) * FULL_EXTENT, page_tables + block_table(1000))
    assert found.total == found.kv_bytes + found.table_bytes


def test_int8_blocks_and_two_that_fill() -> None:
    """A step may begin in one filling block and end in another."""
    config = CacheConfig(kv="int8")
    assert demand_bytes(SMOLLM2, config, Demand(1000, 512)).kv_bytes == 15 * INT8_EXTENT + 2 * FULL_EXTENT
    assert demand_bytes(SMOLLM2, config, Demand(1000)).kv_bytes == 15 * INT8_EXTENT + FULL_EXTENT


def test_a_window_bounds_its_group_only() -> None:
    extent = 8192  # 2 x 2 x 64 x 16 elements of 2 bytes
    near = demand_bytes(HYBRID, CacheConfig(kv="full"), Demand(3000, 32))
    assert near.kv_bytes == ((100 + 32 + 2 * 64) // 64 + 1 + 3000 // 64 + 1) * extent
    further = demand_bytes(HYBRID, CacheConfig(kv="full"), Demand(3064, 32))
    assert further.kv_bytes - near.kv_bytes == extent


def test_several_texts_share_the_page_tables() -> None:
    config = CacheConfig(kv="full")
    one, four = (demand_bytes(SMOLLM2, config, Demand(1000, 512, n)) for n in (1, 4))
    assert four.kv_bytes == 4 * one.kv_bytes
    assert four.table_bytes == 2 * 128 * 30 * 8 + 4 * block_table(1000)  # 4 x 17 blocks: 128 rows


@pytest.mark.parametrize(("num_blocks", "rows"), [(0, 64), (64, 64), (65, 128), (1000, 1024)])
def test_page_tables_double(num_blocks: int, rows: int) -> None:
    assert page_table_rows(num_blocks) == rows


@pytest.mark.parametrize("kv", ["full", "int8"])
@pytest.mark.parametrize("geometry", [SMOLLM2, HYBRID])
def test_a_cache_asks_the_same(geometry: ModelGeometry, kv: str) -> None:
    config = CacheConfig(memory_bytes=64 * 10**6, kv=kv)
    cache = KVCache(geometry, config)
    assert cache.bytes_for(700, 128) == demand_bytes(geometry, config, Demand(700, 128)).total
    assert cache.capacity_tokens(128) == longest_tokens(geometry, config, Demand(0, 128))
    cache.close()


@settings(deadline=None)
@given(
    memory_bytes=st.integers(1, 10**9),
    kv=st.sampled_from(["full", "int8"]),
    block_tokens=st.sampled_from([16, 64, 256]),
    num_sequences=st.integers(1, 40),
    geometry=st.sampled_from([SMOLLM2, HYBRID]),
)
def test_the_longest_fits_and_one_block_more_does_not(
    memory_bytes: int, kv: str, block_tokens: int, num_sequences: int, geometry: ModelGeometry
) -> None:
    config = CacheConfig(memory_bytes=memory_bytes, kv=kv, block_tokens=block_tokens)

    def need(num_tokens: int) -> int:
        return demand_bytes(geometry, config, Demand(num_tokens, 512, num_sequences)).total

    longest = longest_tokens(geometry, config, Demand(0, 512, num_sequences))
    assert longest == 0 or need(longest) <= memory_bytes
    assert need(longest + block_tokens) > memory_bytes
