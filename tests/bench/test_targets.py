"""Targets: what holds, what is broken, what is only reported."""

from __future__ import annotations

import math

import pytest

from ktransformer2.bench.targets import TARGETS, Target, broken, targets_of


@pytest.mark.parametrize(
    ("relation", "bound", "value", "holds"),
    [
        ("<=", 1.0, 1.0, True),
        ("<=", 1.0, 1.01, False),
        (">=", 4.0, 4.0, True),
        (">=", 4.0, 3.99, False),
        ("==", 0.0, 0, True),
        ("==", 0.0, 1, False),
        ("reported", 0.0, 1e9, True),
        ("<=", 1.0, math.nan, False),
        ("reported", 0.0, math.nan, False),
    ],
)
def test_holds(relation: str, bound: float, value: float, holds: bool) -> None:
    assert Target("memory", "x", relation, bound).holds(value) is holds


def test_names_are_unique_and_carry_the_part() -> None:
    names = [target.name for target in TARGETS]
    assert len(set(names)) == len(names)
    assert "1/memory/waste_tokens" in names
    assert "2/architectures/silently_different" in names
    assert targets_of("decode")["decode_vs_hf_best_8k"].text == ">= 1.5"
    assert targets_of("decode")["ttft_vs_hf_8k"].text == "reported"


def test_only_measured_keys_are_judged() -> None:
    assert broken("memory", {"waste_tokens": 0.02}) == []
    missed = broken("memory", {"waste_tokens": 0.02, "saved_vs_static": 0.6, "growth_per_1k_tokens": 4.0})
    assert [target.key for target in missed] == ["saved_vs_static"]
