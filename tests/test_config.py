"""Every setting is checked where it is made: its type, its range, and numbers that no machine has."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from ktransformer2.config import (
    MAX_MEMORY_BYTES,
    CacheConfig,
    EngineConfig,
    TierConfig,
    format_bytes,
    parse_bytes,
    parse_tokens,
)
from ktransformer2.errors import ConfigError
from ktransformer2.memory.growth import GrowthPolicy, PoolUse

FIELDS = [(config, field) for config in (CacheConfig, EngineConfig, TierConfig) for field in dataclasses.fields(config)]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GB", 4 * 10**9),
        ("512MiB", 2**29),
        ("1.5g", 1_500_000_000),
        (" 7 kb ", 7000),
        ("12", 12),
        (0, 0),
        ("64TiB", MAX_MEMORY_BYTES),
        (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(("text", "tokens"), [("32k", 32_768), ("8192", 8192), ("1.5M", 1_572_864), (5, 5)])
def test_token_counts(text: str | int, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("parse", [parse_bytes, parse_tokens])
@pytest.mark.parametrize("written", ["lots", "", "-1", "4 GBit", "1e3", 4.5e9, True, None, b"4"])
def test_what_is_no_size_is_refused(parse: Any, written: object) -> None:
    with pytest.raises(ConfigError, match="is not understood; write a number"):
        parse(written)


@pytest.mark.parametrize("parse", [parse_bytes, parse_tokens])
@pytest.mark.parametrize("written", ["9" * 400 + "M", "71T", 2**46 + 1, 10**400, -1])
def test_sizes_that_no_machine_has_are_refused(parse: Any, written: str | int) -> None:
    if written == "71T" and parse is parse_tokens:
        written = "9999999999M"
    with pytest.raises(ConfigError, match=r"is not allowed; allowed: 0 to 70368744177664 \(2\^46\)") as caught:
        parse(written)
    assert len(str(caught.value)) < 150


def test_a_number_that_python_does_not_print_is_refused() -> None:
    with pytest.raises(ConfigError, match="a number of thousands of digits is not allowed"):
        parse_bytes(10**5000)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (95_312_000, "95.3 MB"),
        (999_999, "1 MB"),
        (4e9, "4 GB"),
        (2**46, "70.4 TB"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("config", "field"), FIELDS, ids=lambda value: getattr(value, "name", ""))
def test_every_field_refuses_what_is_not_of_its_type(config: type[Any], field: dataclasses.Field[Any]) -> None:
    wrong: list[object] = [None, [1], b"x", 10**400, -(10**5000)]
    match field.type:
        case "int":
            wrong += ["64", 64.0, True]
        case "float":
            wrong += ["0.5", True, math.inf, -math.inf, math.nan]
        case "str":
            wrong += [1, 0.5]
        case other:
            pytest.fail(f"{field.name} has type {other}, which nothing checks")
    for value in wrong:
        with pytest.raises(ConfigError, match=f"{field.name}=.* is not allowed; allowed: "):
            config.load({field.name: value})


@pytest.mark.parametrize(
    ("config", "name", "value", "allowed"),
    [
        (CacheConfig, "memory_bytes", 0, "1 or more"),
        (CacheConfig, "memory_bytes", 2**46 + 1, "a whole number up to 2^46"),
        (CacheConfig, "kv", "int4", "auto, full, int8"),
        (CacheConfig, "block_tokens", 100, "16, 32, 64, 128, 256"),
        (CacheConfig, "initial_headroom_ratio", 0.9, "1 to 1000"),
        (CacheConfig, "growth_factor", 1e308, "1 to 1000"),
        (CacheConfig, "low_free_ratio", 1.1, "0 to 1"),
        (CacheConfig, "cached_idle_s", -1, "0 or more"),
        (EngineConfig, "max_step_tokens", 0, "1 or more"),
        (TierConfig, "persist", "yes", "auto, on, off"),
        (TierConfig, "write_policy", "never", "write_through_selective, write_through, write_back"),
        (TierConfig, "disk_bytes", 0, "1 or more"),
        (TierConfig, "flush_s", -1, "0 or more"),
        (TierConfig, "bloom_refresh_s", 0.5, "1 to 86400"),
    ],
)
def test_ranges(config: type[Any], name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load({name: value})
    assert str(caught.value) == f"{name}={value!r} is not allowed; allowed: {allowed}"


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'block_token'; did you mean 'block_tokens'"):
        CacheConfig.load({"block_token": 64})


def test_the_largest_settings_that_are_allowed_overflow_nothing() -> None:
    names = ("memory_bytes", "min_chunk_tokens", "shrink_check_tokens", "maintain_bytes", "defrag_interval_requests")
    largest: dict[str, Any] = dict.fromkeys(names, MAX_MEMORY_BYTES)
    policy = GrowthPolicy(CacheConfig(**largest, initial_headroom_ratio=1000, growth_factor=1000, block_tokens=16))
    use = PoolUse(used=2**30, free=0, extent_tokens=16, growths_in_row=10**6)
    for asked in (0, 1, 2**42):
        assert policy.extents_to_commit(use, asked) >= asked
        assert policy.extents_to_commit(use._replace(used=0), asked) >= asked
    assert policy.extents_to_give_back(use._replace(free=2**40, tokens_since_check=MAX_MEMORY_BYTES)) == 0
