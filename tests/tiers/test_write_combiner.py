"""What the writer is told and what reaches a tier; threads are waited for, never slept for."""

from __future__ import annotations

import logging

import pytest

from ktransformer2.tiers.tier import ROOT
from ktransformer2.tiers.write_combiner import WriteCombiner
from tests.tiers.memory_tier import MemoryTier, block, key

LONG_S = 30.0


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread: the test writes batches itself."""
    monkeypatch.setattr(WriteCombiner, "_start", lambda _: None)


@pytest.mark.usefixtures("by_hand")
def test_blocks_gather_into_batches_in_their_order(tier: MemoryTier) -> None:
    combiner = WriteCombiner([tier], limit_bytes=1000, batch_bytes=200)
    assert all(combiner.offer(block(n, n - 1 if n else None)) for n in range(7))
    while combiner.write_batch():
        pass
    assert tier.transfers == [("put", [key(n) for n in part]) for part in ((0, 1, 2), (3, 4, 5), (6,))]
    stats = combiner.stats()
    assert (stats.offered_blocks, stats.written_blocks, stats.written_bytes, stats.batches) == (7, 7, 7 * 64, 3)


@pytest.mark.usefixtures("by_hand")
def test_the_buffer_is_bounded_and_bytes_are_told_of_once(tier: MemoryTier) -> None:
    combiner = WriteCombiner([tier], limit_bytes=150)
    assert [combiner.offer(block(n)) for n in range(3)] == [True, True, False]
    assert (combiner.held_bytes, combiner.take_freed(), combiner.stats().refused_blocks) == (128, 0, 1)
    combiner.write_batch()
    assert (combiner.held_bytes, combiner.accounted_bytes()) == (0, 128)
    assert (combiner.take_freed(), combiner.take_freed()) == (128, 0)
    assert combiner.offer(block(2))


@pytest.mark.usefixtures("by_hand")
def test_a_block_on_its_way_is_not_taken_twice(tier: MemoryTier) -> None:
    combiner = WriteCombiner([tier], limit_bytes=1000)
    assert combiner.offer(block(0))
    assert combiner.offer(block(0))
    assert combiner.holds(key(0))
    assert combiner.held_bytes == 64
    combiner.write_batch()
    assert not combiner.holds(key(0))
    assert tier.transfers == [("put", [key(0)])]


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("how", ["fails", "raises"])
def test_a_batch_that_no_tier_kept_is_told_of(tier: MemoryTier, how: str, caplog: pytest.LogCaptureFixture) -> None:
    getattr(tier, how).add("put")
    combiner = WriteCombiner([tier], limit_bytes=1000)
    with caplog.at_level(logging.WARNING, "ktransformer2.tiers"):
        for n in range(2):
            combiner.offer(block(n, 7))
            combiner.write_batch()
    assert combiner.take_failed() == [key(0), key(7), key(1), key(7)]
    assert combiner.take_failed() == []
    assert combiner.stats().failed_blocks == 2
    assert combiner.take_freed() == 128
    assert len(caplog.records) == (how == "raises"), "one line, however often it fails"


@pytest.mark.usefixtures("by_hand")
def test_one_tier_that_keeps_a_batch_is_enough(tier: MemoryTier) -> None:
    broken = MemoryTier("broken")
    broken.raises.add("put")
    combiner = WriteCombiner([broken, tier], limit_bytes=1000)
    combiner.offer(block(0))
    combiner.write_batch()
    assert combiner.take_failed() == []
    assert list(tier.blocks) == [key(0)]


@pytest.mark.usefixtures("by_hand")
def test_at_the_end_host_memory_alone_is_written_no_more_and_nothing_has_failed() -> None:
    host = MemoryTier("host")
    combiner = WriteCombiner([host], limit_bytes=1000, linger_s=60.0)
    assert combiner.offer(block(0))
    assert combiner.begin_end() == 0
    assert combiner.held_bytes == 0
    assert combiner.close(1.0)
    assert combiner.stats().failed_blocks == combiner.stats().left_blocks == 0
    assert host.blocks == {}


def test_host_memory_does_not_count_beside_what_lasts(tier: MemoryTier) -> None:
    tier.fails.add("put")
    combiner = WriteCombiner([MemoryTier("host"), tier], limit_bytes=1000)
    combiner.offer(block(0))
    combiner.write_batch()
    assert combiner.take_failed() == [key(0), ROOT]
    assert (combiner.stats().written_blocks, combiner.stats().failed_blocks) == (0, 1)


def test_a_thread_writes_by_itself(tier: MemoryTier) -> None:
    combiner = WriteCombiner([tier], limit_bytes=1000, linger_s=0.0)
    combiner.offer(block(0))
    assert combiner.flush(LONG_S)
    assert list(tier.blocks) == [key(0)]
    assert combiner.close(LONG_S)
    assert combiner.has_ended


def test_flushing_does_not_wait_for_more(tier: MemoryTier) -> None:
    combiner = WriteCombiner([tier], limit_bytes=1000, linger_s=10 * LONG_S)
    combiner.offer(block(0))
    assert combiner.flush(LONG_S)
    assert combiner.close(LONG_S)


def test_a_tier_that_hangs_ends_neither_flush_nor_close_late(tier: MemoryTier) -> None:
    tier.gate.clear()
    combiner = WriteCombiner([tier], limit_bytes=130, linger_s=0.0)
    combiner.offer(block(0))
    combiner.offer(block(1, 0))
    assert tier.entered.wait(LONG_S)
    assert not combiner.flush(0.01)
    assert not combiner.wait_for_room(64, 0.01)
    assert not combiner.close(0.01)
    assert not combiner.has_ended
    assert not combiner.offer(block(2)), "nothing is taken after the end"
    tier.gate.set()


def test_a_tier_that_is_left_out_gets_what_was_offered_before_however_late(tier: MemoryTier) -> None:
    tier.gate.clear()
    tier.limit_bytes = 100
    combiner = WriteCombiner([tier], limit_bytes=1000, batch_bytes=64, linger_s=0.0)
    combiner.begin_end()
    assert combiner.offer(block(0))
    assert combiner.offer(block(1, 0))
    assert tier.entered.wait(LONG_S)
    assert not combiner.narrow(1000, 0.01), "it keeps less, and hangs in the first batch"
    tier.gate.set()
    assert not combiner.narrow(1000, LONG_S)
    assert list(tier.blocks) == [key(0), key(1)]
    assert combiner.close(LONG_S)
    assert (combiner.stats().written_blocks, combiner.stats().failed_blocks) == (2, 0)


def test_room_comes_as_batches_are_written(tier: MemoryTier) -> None:
    combiner = WriteCombiner([tier], limit_bytes=64, linger_s=10 * LONG_S)
    for n in range(5):
        assert combiner.wait_for_room(64, LONG_S)
        assert combiner.offer(block(n, n - 1 if n else None))
    assert combiner.close(LONG_S)
    assert len(tier.blocks) == 5
    assert combiner.stats().cpu_s > 0


def test_nothing_offered_starts_no_thread(tier: MemoryTier) -> None:
    combiner = WriteCombiner([tier], limit_bytes=64)
    assert combiner.close(0.0)
    assert combiner.has_ended
