"""Medians, intervals, quantiles and the order of rounds."""

from __future__ import annotations

import pytest

from ktransformer2.bench.rounds import interleaved, quantile, ratio, spread


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (5, 1, 5),  # 2 * 1/32 > 5 %: no interval, the extremes
        (6, 1, 6),  # 2 * 1/64 = 3.1 %
        (9, 2, 8),  # 2 * (1+9)/512 = 3.9 %
        (20, 6, 15),  # the table value for n = 20
    ],
)
def test_interval_is_the_order_statistics_one(count: int, low: int, high: int) -> None:
    found = spread([float(i) for i in range(count, 0, -1)])
    assert (found.low, found.high, found.count) == (low, high, count)
    assert found.median == (count + 1) / 2


def test_interval_of_one_value_is_the_value() -> None:
    found = spread([3.0])
    assert (found.median, found.low, found.high) == (3.0, 3.0, 3.0)
    assert found.as_row("ms", 1000.0) == {"ms": 3000.0, "ms_low": 3000.0, "ms_high": 3000.0}


def test_quantile_is_a_value_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert quantile(values, 0.99) == 99.0
    assert quantile(values, 0.5) == 50.0
    assert quantile([7.0], 0.99) == 7.0


def test_ratio_is_taken_inside_a_round() -> None:
    assert ratio([2.0, 20.0, 6.0], [1.0, 10.0, 3.0]).median == 2.0


def test_contenders_take_turns_and_the_first_call_is_not_counted() -> None:
    calls: list[str] = []
    now = [0.0]

    def take(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    seconds = interleaved({"a": lambda: take("a", 1.0), "b": lambda: take("b", 3.0)}, rounds=4, clock=lambda: now[0])
    assert seconds == {"a": [1.0] * 4, "b": [3.0] * 4}
    assert calls[:2] == ["a", "b"]
    for i in range(2, 10, 2):
        assert sorted(calls[i : i + 2]) == ["a", "b"]
