"""The filter in front of the disk tier: what it is told passes, what others wrote passes after a refresh."""

from __future__ import annotations

from ktransformer2.tiers.disk_filter import DiskFilter
from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.tier import TierStats
from tests.tiers.disk_factories import Clock, key_of

A, B, C = (key_of(name) for name in "abc")


def test_what_it_is_told_passes_and_nothing_else() -> None:
    disk_filter = DiskFilter(60.0, Tally("disk"))
    disk_filter.tell([A, B])
    assert [disk_filter.passes(key) for key in (A, B, C)] == [True, True, False]


def test_it_is_refreshed_at_first_and_when_it_is_old() -> None:
    clock, tally, asked = Clock(), Tally("disk"), []
    disk_filter = DiskFilter(60.0, tally, clock)

    def keys() -> list[bytes]:
        asked.append(clock.now_s)
        return [A, B]

    disk_filter.refresh(keys)
    disk_filter.refresh(keys)
    assert len(asked) == 1
    assert disk_filter.passes(A)
    clock.now_s += 60
    disk_filter.refresh(keys)
    assert len(asked) == 2


def test_what_it_denied_and_others_had_written_is_counted_once() -> None:
    clock, tally = Clock(), Tally("disk")
    disk_filter = DiskFilter(60.0, tally, clock)
    assert not any([disk_filter.passes(A), disk_filter.passes(A), disk_filter.passes(B), disk_filter.passes(C)])
    disk_filter.tell([B])  # this process wrote it itself
    disk_filter.refresh(lambda: [A, B])
    clock.now_s += 60
    disk_filter.refresh(lambda: [A, B])
    stats: TierStats = tally.stats(0, 0, 0)
    assert stats.filter_missed == 1


def test_it_is_rebuilt_when_what_is_gone_wears_it() -> None:
    asked: list[bool] = []
    disk_filter = DiskFilter(1e9, Tally("disk"), Clock())

    def keys() -> list[bytes]:
        asked.append(True)
        return [A]

    for i in range(5000):
        disk_filter.tell([key_of(f"gone {i}")])
        disk_filter.refresh(keys)
    assert len(asked) >= 3
    assert disk_filter.passes(A)
    passed = sum(disk_filter.passes(key_of(f"gone {i}")) for i in range(2000))
    assert passed <= 40
