"""What chose the defaults that bound something: counted by hand, and on traces cut short."""

from __future__ import annotations

from typing import Any

import pytest

from ktransformer2.bench import limits
from ktransformer2.bench.limits import GRID, gaps, kept_for
from ktransformer2.bench.policy_trace import BlockRequest, Interleaving
from ktransformer2.settings import knobs


def test_the_gaps_between_the_uses_of_a_block() -> None:
    requests = [BlockRequest(0.0, [1, 2]), BlockRequest(5.0, [1, 3]), BlockRequest(25.0, [1, 2])]
    assert gaps(requests) == ([5.0, 20.0, 25.0], 3)


def test_a_block_waits_for_its_use_or_for_nothing() -> None:
    # Three gaps of 5, 20 and 25 s, and three last uses after which a block waits for nothing.
    assert kept_for(20.0, [5.0, 20.0, 25.0], 3) == {
        "missed": pytest.approx(1 / 3),
        "held_s_per_use": pytest.approx((5 + 20 + 20 + 3 * 20) / 6),
    }
    assert kept_for(30.0, [5.0, 20.0, 25.0], 3)["missed"] == 0


def test_every_grid_holds_its_default_amid_other_values() -> None:
    for name, values in GRID.items():
        knob = knobs()[name]
        assert knob.default in values[1:-1], name
        assert list(values) == sorted(set(values)), name
        for value in values:
            assert knob.read(value) == value


def test_what_is_counted_shows_what_a_knob_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_QUICK_AGENTS", Interleaving(seed=2024, max_touches=5_000))
    monkeypatch.setattr(limits, "_MOONCAKE", ("mooncake_synthetic_blocks",))
    monkeypatch.setattr(limits, "_CHATS", (40, 40))
    monkeypatch.setattr(limits, "_LENGTHS", {"azure_2023_conv": (8, 8)})
    monkeypatch.setattr(limits, "_LONG_TOKENS", (2_000, 2_000))
    monkeypatch.setattr(limits, "GRID", {**GRID, "max_num_sequences": (4, 32), "maintain_bytes": (2**20, 2**23)})
    rows: dict[Any, Any] = {(row["knob"], row["value"]): row for row in limits.rows(quick=True)}
    assert {knob for knob, _ in rows} == set(GRID)
    missed = [rows["cached_idle_s", value]["missed"] for value in GRID["cached_idle_s"]]
    held = [rows["cached_idle_s", value]["held_s_per_use"] for value in GRID["cached_idle_s"]]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > missed[-1]
    assert held == sorted(held)
    few, many = (rows["max_num_sequences", value] for value in (4, 32))
    assert few["steps"] > many["steps"]
    small, default = (rows["maintain_bytes", value]["longest_copy_mb"] for value in (2**20, 2**23))
    assert 0 < small < default
    assert rows["growth_factor", 1.5]["growth_per_1k"] > 0
