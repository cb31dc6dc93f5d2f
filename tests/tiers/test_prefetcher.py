"""What is asked of tiers and what arrives; threads are waited for, never slept for."""

from __future__ import annotations

import logging
import threading

import pytest

from ktransformer2.tiers import prefetcher
from ktransformer2.tiers.prefetcher import Prefetcher
from tests.tiers.memory_tier import MemoryTier, block, key

LONG_S = 30.0
KEYS = [key(n) for n in range(4)]


def filled(name: str, *numbers: int) -> MemoryTier:
    tier = MemoryTier(name)
    tier.put([block(n) for n in numbers])
    tier.transfers.clear()
    tier.entered.clear()
    return tier


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread: the test reads itself."""
    monkeypatch.setattr(Prefetcher, "_start", lambda _: None)


def read(reader: Prefetcher, *tickets: int) -> list[tuple[int, int, tuple[str, ...]]]:
    """Submit KEYS once for each ticket; per arrival: ticket, bytes, tiers."""
    for ticket in tickets:
        assert reader.submit(ticket, KEYS)
    while reader.read_one():
        pass
    return [(each.ticket, each.num_bytes, each.tiers) for each in reader.arrivals()]


@pytest.mark.usefixtures("by_hand")
def test_a_chain_arrives_as_far_as_it_goes() -> None:
    tier = filled("disk", 0, 1, 3)
    assert read(Prefetcher([tier]), 7) == [(7, 128, ("disk", "disk"))]


@pytest.mark.usefixtures("by_hand")
def test_what_one_tier_lacks_the_next_one_gives() -> None:
    near, far = filled("host", 1, 3), filled("disk", 0, 1, 2)
    assert read(Prefetcher([near, far]), 1) == [(1, 256, ("disk", "disk", "disk", "host"))]
    assert near.transfers == [("get", KEYS[3:])], "its filter answers for what it has not"


@pytest.mark.usefixtures("by_hand")
def test_a_filter_that_says_yes_to_everything_ends_in_a_miss() -> None:
    tier = MemoryTier()
    tier.says_yes = True
    assert read(Prefetcher([tier]), 1) == [(1, 0, ())]


@pytest.mark.usefixtures("by_hand")
def test_short_reads_are_continued() -> None:
    tier = filled("disk", 0, 1, 2, 3)
    tier.most = 1
    assert read(Prefetcher([tier]), 1) == [(1, 256, ("disk",) * 4)]


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("call", ["get", "may_hold"])
def test_a_tier_that_raises_has_nothing(call: str, caplog: pytest.LogCaptureFixture) -> None:
    broken, tier = filled("disk", 0, 1, 2, 3), filled("remote", 0, 1)
    broken.raises.add(call)
    with caplog.at_level(logging.WARNING, "ktransformer2.tiers"):
        assert read(Prefetcher([broken, tier]), 1, 2) == [(1, 128, ("remote",) * 2), (2, 128, ("remote",) * 2)]
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("by_hand")
def test_what_is_cancelled_arrives_empty_and_unread() -> None:
    tier = filled("disk", 0)
    reader = Prefetcher([tier])
    for ticket in (1, 2, 1):
        assert reader.submit(ticket, KEYS[:1])
    reader.cancel(1)
    assert reader.read_one()
    assert not reader.read_one()
    assert [(each.ticket, len(each.payloads)) for each in reader.arrivals()] == [(1, 0), (1, 0), (2, 1)]
    assert len(tier.transfers) == 1


@pytest.mark.usefixtures("by_hand")
def test_the_queue_is_bounded() -> None:
    reader = Prefetcher([MemoryTier()])
    assert all(reader.submit(n, KEYS) for n in range(prefetcher.MOST_WAITING))
    assert not reader.submit(99, KEYS)


def test_a_thread_reads_by_itself_and_waiting_ends_when_something_came() -> None:
    tier = filled("disk", 0)
    reader = Prefetcher([tier])
    assert not reader.wait(0.0)
    reader.submit(1, KEYS)
    assert reader.wait(LONG_S)
    assert [each.num_bytes for each in reader.arrivals()] == [64]
    assert reader.arrivals() == []
    assert reader.close(LONG_S)
    assert not reader.submit(2, KEYS)


def test_a_tier_that_hangs_does_not_hold_up_the_end() -> None:
    tier = filled("disk", 0)
    tier.gate.clear()
    reader = Prefetcher([tier])
    reader.submit(1, KEYS)
    assert tier.entered.wait(LONG_S)
    assert not reader.close(0.01)
    tier.gate.set()
    assert reader.close(LONG_S)


def test_where_no_thread_can_start_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reader = Prefetcher([MemoryTier()])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not reader.submit(1, [key(0)])
    assert reader.close()
