"""The classes of the hazard order, what it learns of them, and the arithmetic of the model, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ktransformer2.cache.replacement.hazard import NUM_CLASSES, Hazard, kind_of
from ktransformer2.cache.replacement.lru import LRU
from ktransformer2.cache.replacement.policy import Entry, ReplacementPolicy
from ktransformer2.cache.replacement.reuse_model import BIN_STARTS_S, NUM_BINS, ReuseModel, age_bin, gittins
from tests.cache.replacement.keyed import Keyed

_EDGES_S = [(2 ** (n / 2) - 1) / 10 for n in range(NUM_BINS + 1)]


def kind(hits: int = 0, turn: int = 0, full: bool = True, over: bool = False) -> int:
    entry = Entry(1, None, 1, full)
    entry.hits, entry.turn, entry.over = hits, turn, over
    return kind_of(entry)


def test_classes_by_hits_and_turn() -> None:
    assert [kind(hits) for hits in range(11)] == [0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5]
    assert [kind(turn=turn) for turn in range(6)] == [0, 6, 12, 18, 18, 18]
    assert kind(hits=2, turn=1) == 8


def test_partial_blocks_are_one_class_and_what_is_over_another_half() -> None:
    assert {kind(hits, turn, full=False) for hits in range(9) for turn in range(5)} == {24}
    assert kind(over=True) == 25
    assert kind(full=False, over=True) == NUM_CLASSES - 1 == 49


def played(policy: ReplacementPolicy) -> Keyed:
    """A prefix that comes back every second beside texts that never do; a text came last."""
    bed = Keyed(policy, 8)
    if isinstance(policy, Hazard):
        policy._clock = lambda: bed.now
    for second in range(40):
        bed.now = float(second)
        bed.touch(b"prefix")
        bed.now += 0.5
        bed.touch(second)
    return bed


def test_it_learns_who_comes_back_and_lets_go_of_who_does_not() -> None:
    policy = Hazard(lambda: 0.0, uses_per_fit=20)
    bed = played(policy)
    assert not policy.by_recency, "it has learned"
    bed.now += 0.1
    assert [bed.evict() for _ in range(8)] == [33, 34, 35, 36, 37, 38, 39, b"prefix"]
    assert played(LRU()).evict() == 33, "the oldest of all"


def test_it_goes_by_last_use_until_it_has_learned() -> None:
    policy = Hazard(lambda: 0.0)
    bed = played(policy)
    assert policy.by_recency
    assert [bed.evict() for _ in range(8)] == [33, 34, 35, 36, 37, 38, b"prefix", 39]


def test_a_key_that_comes_back_after_it_left_is_known() -> None:
    bed = Keyed(Hazard(lambda: bed.now), 2)
    for key in (1, 1, 2, 3):
        bed.now += 1.0
        bed.touch(key)
    assert bed.retention.get(1) is None
    bed.touch(1)
    assert bed.entry(1).hits == 2, "two uses before it left, and this one"


def test_what_comes_behind_a_key_that_was_known_is_a_later_turn() -> None:
    retention = Keyed(Hazard(lambda: 0.0), 2).retention
    first = retention.admit(1, None, 1)
    retention.release(first)
    retention.evict(first)
    again, child = retention.admit(1, None, 1), retention.admit(2, 1, 1)
    assert (again.hits, again.turn) == (1, 0)
    assert (child.hits, child.turn) == (0, 1)


# --- the model


def test_ages_fall_into_bins_half_a_doubling_wide() -> None:
    assert [age_bin(age) for age in (0.0, 0.1, 0.3, 0.7, 1.5)] == [0, 2, 4, 6, 8]
    assert age_bin(1e9) == NUM_BINS - 1
    assert all(age_bin(start) >= number for number, start in enumerate(BIN_STARTS_S))


def test_a_lull_is_worth_what_comes_after_it() -> None:
    """A use that is sure to come in bin 10 and nowhere else: one hit for the time until then."""
    chances = np.zeros((2, NUM_BINS))
    chances[1, 10] = 1.0
    never, index = gittins(chances)
    assert not never.any()
    for start in (0, 5, 10):
        assert index[start] == pytest.approx(1 / ((_EDGES_S[10] + _EDGES_S[11]) / 2 - _EDGES_S[start]))
    assert index[11] == 0


def test_a_wait_that_still_runs_counts_as_at_risk() -> None:
    """Four waits in the first bin: three uses, and one that runs, which counts for half of the bin."""
    model = ReuseModel(2, half_life_fits=32.0)
    model.newest[0] = 4
    for _ in range(3):
        model.used(0, model.epoch, 0.0)
    model.fit(now=0.0)
    chance = 3 / 3.5
    assert model.worth[0][0] == pytest.approx(chance / (_EDGES_S[1] * (1 - chance / 2)))
    assert model.worth[1] == [0.0] * NUM_BINS, "the other half has learned nothing from it"
    assert model.epoch == 2


def test_a_wait_belongs_to_the_class_it_turned_out_to_be() -> None:
    model = ReuseModel(2, half_life_fits=32.0)
    model.newest[0] = 1
    model.reclassify(0, 1, model.epoch)
    model.used(1, model.epoch, 0.0)
    model.fit(now=0.0)
    assert model.worth[0] == [0.0] * NUM_BINS
    assert model.worth[1][0] == pytest.approx(1 / (_EDGES_S[1] / 2))
