"""A plan by hand; what fits, what would; and the promise that the longest context is one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformer2.cache.sizing import Demand, demand_bytes
from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.engine.memory_budget import Memory, auto_memory_bytes, most_useful_bytes, workspace_bytes
from ktransformer2.engine.plan import Plan, Wish, idle_process_bytes, plan
from ktransformer2.layout import Form, LayerGroup, ModelGeometry
from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.outline import ModelOutline

MB, GB = 10**6, 10**9
GEOMETRY = ModelGeometry((LayerGroup(tuple(range(30)), 3, 64, 64),), Form.FP32, 8192, (None,))
HYBRID = ModelGeometry(
    (LayerGroup(tuple(range(4)), 2, 64, 64, 512), LayerGroup((4, 5), 2, 64, 64)), Form.BF16, 131_072, (None, None)
)
FOOTPRINT = ModelFootprint(538 * MB, 25_344, 196_608, 49_152, chooses_logits=True)
OUTLINE = ModelOutline("a/model", "llama", "float32", GEOMETRY, FOOTPRINT)
MACHINE = Memory(16 * GB)
PROCESS = 400 * MB
WORKSPACE = 512 * 25_344 + 196_608 + 49_152 * 32 + 49_152 * 900


def planned(wish: Wish, outline: ModelOutline = OUTLINE) -> Plan:
    return plan(outline, wish, PROCESS, MACHINE)


def test_every_part_by_hand() -> None:
    found = planned(Wish(2048, memory_bytes=GB))
    full, int8 = found.forms
    assert (found.process_bytes, found.weight_bytes, found.workspace_bytes) == (PROCESS, 538 * MB, WORKSPACE)
    extent = 30 * 2 * 3 * 64 * 64 * 4
    tables = 2 * 64 * 30 * 8 + 33 * (4 * 64 + 105)
    assert (full.form, full.kv_bytes, full.table_bytes) == ("fp32", 33 * extent, tables)
    assert (int8.form, int8.kv_bytes, int8.table_bytes) == ("int8", 32 * 761_856 + 2 * extent, tables)
    assert full.total_bytes == PROCESS + 538 * MB + WORKSPACE + 33 * extent + tables
    assert (full.limit_bytes, full.longest_tokens, full.fits) == (GB, 8192, True)
    assert found.choice is int8
    assert (found.fits, found.advice, found.peak_bytes) == (True, (), int8.total_bytes)


def test_without_a_length_the_models_own_is_planned() -> None:
    assert planned(Wish(memory_bytes=GB)).num_tokens == 8192


def test_a_peak_while_loading_counts() -> None:
    """Weights of 538 MB, made from a file of 269 MB, beside a short text."""
    outline = dataclasses.replace(OUTLINE, copied_bytes=269 * MB)
    found = planned(Wish(64, memory_bytes=GB), outline)
    assert found.peak_bytes == PROCESS + 538 * MB + 269 * MB > found.choice.total_bytes
    assert planned(Wish(8192, 4, memory_bytes=4 * GB), outline).peak_bytes > found.peak_bytes


def test_a_total_is_what_the_rest_leaves_for_the_cache() -> None:
    found = planned(Wish(8192, total_bytes=2 * GB))
    assert found.choice.limit_bytes == 2 * GB - PROCESS - 538 * MB - WORKSPACE
    assert planned(Wish(8192, total_bytes=2 * GB, memory_bytes=MB)).choice.limit_bytes == MB
    assert planned(Wish(8192, total_bytes=500 * MB)).choice.limit_bytes == 0


def test_auto_is_the_rule_of_the_engine() -> None:
    config = EngineConfig(max_num_sequences=3)
    workspace = workspace_bytes(FOOTPRINT, config)
    assert workspace == 512 * 25_344 + 3 * 196_608 + 49_152 * 32 + 49_152 * 900
    expected = auto_memory_bytes(MACHINE, 538 * MB, workspace, most_useful_bytes(GEOMETRY, config))
    assert planned(Wish(engine=config)).choice.limit_bytes == expected


def test_what_does_not_fit_is_told_with_every_way_out() -> None:
    found = planned(Wish(8192, 4, total_bytes=1800 * MB, cache=CacheConfig(kv="full")))
    assert found.chosen == "full"
    assert not found.fits
    need = found.choice.kv_bytes + found.choice.table_bytes
    assert need == demand_bytes(GEOMETRY, CacheConfig(kv="full"), Demand(8192, 512, 4)).total
    assert found.advice == (
        "the cache needs 1.52 GB, its limit is 802 MB",
        "--ctx 4287, the longest that fits",
        "--kv int8: 1.41 GB in all",
        "--dtype bfloat16: 1.48 GB in all",
        "--sequences 2",
        "--total 2520MB",
    )
    for wish in (
        Wish(4287, 4, total_bytes=1800 * MB, cache=CacheConfig(kv="full")),
        Wish(8192, 4, total_bytes=1800 * MB, cache=CacheConfig(kv="int8")),
        Wish(8192, 2, total_bytes=1800 * MB, cache=CacheConfig(kv="full")),
        Wish(8192, 4, total_bytes=2520 * MB, cache=CacheConfig(kv="full")),
    ):
        assert planned(wish).fits, wish


def test_a_memory_limit_that_is_too_small_names_the_one_that_is_not() -> None:
    found = planned(Wish(8192, memory_bytes=50 * MB))
    assert found.advice[-1] == "--memory 104MB"
    assert planned(Wish(8192, memory_bytes=104 * MB)).fits
    assert not planned(Wish(8192, memory_bytes=103 * MB)).fits


def test_more_than_the_models_own_context() -> None:
    found = planned(Wish(131_072, memory_bytes=64 * GB))
    assert not found.fits
    assert found.advice == ("131,072 tokens are more than the model's own context of 8,192", "--ctx 8192")


def test_where_nothing_fits_no_length_is_named() -> None:
    found = planned(Wish(8192, total_bytes=500 * MB))
    assert found.choice.longest_tokens == 0
    assert not any("--ctx" in way or "--kv" in way for way in found.advice)


def test_an_idle_process_holds_something() -> None:
    assert idle_process_bytes() > 50 * MB


@settings(deadline=None)
@given(
    outline=st.sampled_from([OUTLINE, dataclasses.replace(OUTLINE, geometry=HYBRID)]),
    total_bytes=st.integers(950 * MB, 8 * GB),
    num_sequences=st.integers(1, 50),
    kv=st.sampled_from(["full", "int8"]),
    block_tokens=st.sampled_from([16, 64, 256]),
)
def test_the_longest_context_fits_and_one_block_more_does_not(
    outline: ModelOutline, total_bytes: int, num_sequences: int, kv: str, block_tokens: int
) -> None:
    cache = CacheConfig(kv=kv, block_tokens=block_tokens)

    def at(num_tokens: int) -> Plan:
        return planned(Wish(num_tokens, num_sequences, total_bytes, cache=cache), outline)

    longest = at(1).choice.longest_tokens
    if longest:
        assert at(longest).fits
        assert at(longest).choice.total_bytes <= total_bytes
    more = at(longest + block_tokens)
    assert not more.fits
    assert more.choice.total_bytes > total_bytes or longest + block_tokens > outline.geometry.max_positions


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_auto_blocks_are_int8(kv: str) -> None:
    assert planned(Wish(cache=CacheConfig(kv=kv))).chosen == "int8"
