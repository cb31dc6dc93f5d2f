"""What callers say of entries, in the order in which they say it: the last word counts."""

from __future__ import annotations

import pytest

from ktransformer2.cache.replacement import POLICIES, make_policy
from ktransformer2.cache.replacement.bands import Bands
from ktransformer2.cache.replacement.policy import Entry
from ktransformer2.cache.replacement.retention import Retention


class Bed:
    """Two idle entries, 1 used before 2, under a policy within bands."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        self.bands = Bands(make_policy(name, lambda: self.now), lambda: self.now)
        self.retention = Retention(self.bands, lambda: self.now)
        self.first, self.second = (self._idle(key) for key in (1, 2))

    def _idle(self, key: int) -> Entry:
        entry = self.retention.admit(key, None, 1)
        self.retention.release(entry)
        return entry

    def victim(self) -> Entry | None:
        found = self.retention.victim()
        self.retention.check_integrity()
        return found


@pytest.fixture(params=POLICIES)
def bed(request: pytest.FixtureRequest) -> Bed:
    return Bed(request.param)


def test_who_waits_goes_last_until_its_time_is_over(bed: Bed) -> None:
    bed.bands.waiting([bed.first], 10.0)
    assert bed.victim() is bed.second
    bed.retention.evict(bed.second)
    assert bed.victim() is bed.first, "nothing else is left"
    bed.now = 11.0
    other = bed._idle(3)
    assert bed.victim() in (bed.first, other)
    assert bed.first.band == 0


def test_a_wait_takes_back_that_it_is_over(bed: Bed) -> None:
    bed.bands.ended([bed.first])
    bed.bands.waiting([bed.first], 10.0)
    assert not bed.first.over
    assert bed.victim() is bed.second


def test_over_counts_again_after_a_wait(bed: Bed) -> None:
    bed.bands.ended([bed.first])
    bed.bands.waiting([bed.first], 10.0)
    bed.bands.ended([bed.first])
    assert bed.first.over
    bed.now = 100.0
    assert bed.victim() is bed.first
    assert bed.first.band <= 0, "nobody waits for it any more"


def test_the_least_worthy_of_the_next_goes_and_hints_come_before_worth(bed: Bed) -> None:
    bed.retention.worth = lambda entry: 1.0 if entry is bed.second else 2.0
    assert bed.victim() is bed.second
    assert bed.victim() is bed.second, "asking changes nothing"
    bed.bands.waiting([bed.second], 10.0)
    assert bed.victim() is bed.first


def test_where_all_are_worth_the_same_the_policy_decides(bed: Bed) -> None:
    chosen = bed.victim()
    bed.retention.worth = lambda _: 1.0
    assert bed.victim() is chosen
