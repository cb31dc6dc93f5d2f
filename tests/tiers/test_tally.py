"""Counts are whole, and a failure that goes on does not fill the log."""

from __future__ import annotations

import logging
import threading

import pytest

from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.tier import TierStats


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_counts_have_the_names_of_the_stats() -> None:
    tally = Tally("disk")
    tally.count(stored_blocks=2, stored_bytes=20)
    tally.count(stored_blocks=1, lookups=3)
    for size in (10, 30, 20):
        tally.transfer(size)
    assert tally.stats(1, 10, 100) == TierStats(
        "disk", 1, 10, 100, stored_blocks=3, stored_bytes=20, lookups=3, transfers=3, median_transfer_bytes=20
    )
    tally.count(no_such_figure=1)
    with pytest.raises(TypeError, match="no_such_figure"):
        tally.stats(0, 0, 0)


def test_no_count_is_lost_between_threads() -> None:
    tally = Tally("host")

    def count() -> None:
        for _ in range(2000):
            tally.count(lookups=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.stats(0, 0, 0).lookups == 8000


def test_a_failure_is_told_once_a_minute_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    tally = Tally("disk", clock)
    with caplog.at_level(logging.WARNING, "ktransformer2.tiers"):
        for _ in range(5):
            tally.failed("read", "OSError")
        tally.failed("full", "no space", times=3)
        clock.now += 61
        tally.failed("read", "OSError")
        clock.now -= 1000  # a clock that jumps back silences nobody
        tally.failed("read", "OSError")
    assert tally.stats(0, 0, 0).failures == {"read": 7, "full": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "the disk tier: read: OSError; going on without",
        "the disk tier: full: no space; going on without",
        "the disk tier: read: OSError (5 since the last line); going on without",
        "the disk tier: read: OSError; going on without",
    ]
