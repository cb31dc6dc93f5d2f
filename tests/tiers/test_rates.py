from __future__ import annotations

import pytest

from ktransformer2.tiers.rates import STALE_S, DecayedMedian, Estimate, LoadOrRecompute


def test_a_median_is_not_moved_by_a_few_outliers_and_follows_what_stays() -> None:
    median = DecayedMedian()
    assert median.value() is None
    for sample in (10.0, 10.0, 10.0, 10.0, 900.0):
        median.add(sample, 0.0)
    assert median.value() == 10.0
    for _ in range(6):  # newer samples weigh more: six of them outweigh five older ones
        median.add(2.0, 0.0)
    assert median.value() == 2.0


def test_it_forgets_what_is_old() -> None:
    median = DecayedMedian()
    for sample in range(1000):
        median.add(float(sample), 0.0)
    assert median.value() is not None
    assert (median.value() or 0) > 960


@pytest.mark.parametrize(
    ("load_s", "compute_s", "is_worth"),
    [(None, None, True), (5.0, None, True), (None, 0.1, True), (0.1, 0.2, True), (0.2, 0.2, False), (3.0, 0.2, False)],
)
def test_what_is_not_measured_is_tried(load_s: float | None, compute_s: float | None, is_worth: bool) -> None:
    assert Estimate(load_s, compute_s).is_worth_loading == is_worth


def test_estimates_come_from_what_was_measured() -> None:
    speeds = LoadOrRecompute()
    assert speeds.estimate(100, 1000, 0.0) == Estimate(None, None)
    speeds.loaded(1000, 0.5, 0.0)  # 2,000 bytes a second
    speeds.waited(0.25, 0.0)
    speeds.computed(50, 0.5, 0.0)  # 100 tokens a second
    assert speeds.estimate(200, 4000, 1.0) == Estimate(2.25, 2.0)
    assert speeds.estimate(200, 1000, 1.0) == Estimate(0.75, 2.0)


def test_an_old_measurement_is_no_reason_to_refuse() -> None:
    speeds = LoadOrRecompute()
    for _ in range(3):
        speeds.loaded(1, 1.0, 0.0)
    speeds.computed(1000, 1.0, 0.0)
    assert not speeds.estimate(10, 10, STALE_S - 1).is_worth_loading
    assert speeds.estimate(10, 10, STALE_S).is_worth_loading
    speeds.loaded(10**6, 1.0, STALE_S)
    assert speeds.estimate(10, 10, STALE_S + 1).load_s == 10.0, "one fast transfer is not a trend"
    for _ in range(2):
        speeds.loaded(10**6, 1.0, STALE_S)
    assert speeds.estimate(10, 10, STALE_S + 1).load_s == pytest.approx(1e-5)
