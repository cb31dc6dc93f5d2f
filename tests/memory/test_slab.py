"""Slab pools: exact places, growth and shrink, what pools give each other, and state machines over two pools."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ktransformer2.memory import Arena, SlabPool
from tests.memory.factories import MIB, PAGE, allocate, holds, make_pool, policy, write

LIMIT = 600 * PAGE
SIZES = (7 * PAGE, 12 * PAGE)


class PoolsAgainstModel(RuleBasedStateMachine):
    """Two pools of one arena. The model: which extents are in use, by whom, and the mark that each carries."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(LIMIT)
        self.pools = [make_pool(self.arena, size) for size in SIZES]
        self.held: dict[int, tuple[int, int]] = {}  # address -> (pool, mark)
        self.charged = 0
        self.next_mark = 1

    @property
    def unused_bytes(self) -> int:
        """What an allocation may count on: everything that no extent and no charge uses."""
        return LIMIT - self.charged - sum(SIZES[which] for which, _ in self.held.values())

    def can_have(self, which: int, num_extents: int) -> bool:
        """Whether the pool can hold so many more: what it has free, and the rest in what nobody else uses."""
        pool = self.pools[which]
        missing = max(0, num_extents - pool.num_free_committed)
        return missing * SIZES[which] <= self.unused_bytes - pool.reclaimable_bytes

    @rule(which=st.integers(0, 1), data=st.data())
    def allocate(self, which: int, data: st.DataObject) -> None:
        near = data.draw(st.sampled_from([0, *sorted(self.held)]))
        fits = self.can_have(which, 1)
        assert fits or self.unused_bytes < SIZES[which], "refused while free >= request"
        address = self.pools[which].allocate(near)
        assert (address is not None) == fits
        if address is not None:
            assert address % PAGE == 0
            self.held[address] = (which, self.next_mark)
            write(address, SIZES[which], self.next_mark)
            self.next_mark += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 12))
    def free(self, data: st.DataObject, count: int) -> None:
        first = data.draw(st.integers(0, len(self.held) - 1))
        for address in sorted(self.held)[first : first + count]:
            which, mark = self.held.pop(address)
            assert holds(address, SIZES[which], mark)
            self.pools[which].free(address)

    @rule(which=st.integers(0, 1), count=st.integers(0, 30))
    def reserve(self, which: int, count: int) -> None:
        fits = self.can_have(which, count)
        assert self.pools[which].reserve(count) == fits
        if fits:
            assert self.pools[which].num_free_committed >= count

    @rule(which=st.integers(0, 1))
    def shrink(self, which: int) -> None:
        before = self.pools[which].committed_bytes
        assert self.pools[which].shrink() == before - self.pools[which].committed_bytes

    @rule(which=st.integers(0, 1))
    def trim(self, which: int) -> None:
        free = self.pools[which].reclaimable_bytes
        assert self.pools[which].trim() == free
        assert self.pools[which].committed_bytes == self.pools[which].used_bytes

    @rule(num_pages=st.integers(0, 200))
    def charge(self, num_pages: int) -> None:
        fits = num_pages * PAGE <= self.unused_bytes
        assert self.arena.charge(num_pages * PAGE) == fits
        self.charged += num_pages * PAGE if fits else 0

    @rule()
    def discharge(self) -> None:
        self.arena.discharge(self.charged)
        self.charged = 0

    @invariant()
    def agrees(self) -> None:
        self.arena.check_integrity()
        for which, pool in enumerate(self.pools):
            pool.check_integrity()
            assert pool.num_used == sum(owner == which for owner, _ in self.held.values())
            assert 0 <= pool.fragmentation_ratio < 1
        assert self.arena.stats.committed_bytes == sum(pool.committed_bytes for pool in self.pools)
        assert self.arena.stats.used_bytes <= LIMIT
        assert all(holds(address, SIZES[which], mark) for address, (which, mark) in self.held.items())

    def teardown(self) -> None:
        assert self.arena.resident_bytes() <= self.arena.stats.committed_bytes
        for address, (which, _) in self.held.items():
            self.pools[which].free(address)
        for pool in self.pools:
            pool.trim()
            assert pool.num_runs == 0
        assert self.arena.resident_bytes() == 0
        self.arena.close()


PoolsAgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolsAgainstModel = PoolsAgainstModel.TestCase


@pytest.mark.slow
def test_a_million_operations() -> None:
    """No allocation fails while free >= request, the limit holds, and every extent keeps its own mark."""
    rng = random.Random(20260101)
    limit = 3000 * PAGE
    arena = Arena(limit)
    pools = [make_pool(arena, size) for size in (7 * PAGE, 12 * PAGE, 33 * PAGE)]
    held: list[list[int]] = [[], [], []]
    used = refused = 0
    for step in range(1_000_000):
        which = rng.randrange(3)
        pool, mine = pools[which], held[which]
        # The share of allocations swings slowly, so that memory fills up, runs short and empties again.
        if rng.random() < (0.6 if step // 20_000 % 2 else 0.45):
            address = pool.allocate(mine[-1] if mine else 0)
            if address is None:
                refused += 1
                assert limit - used < pool.extent_bytes, f"step {step}: refused with {limit - used} bytes unused"
            else:
                mine.append(address)
                used += pool.extent_bytes
                write(address, PAGE, address)
        elif mine:
            at = rng.randrange(len(mine))
            address, mine[at] = mine[at], mine[-1]
            mine.pop()
            assert holds(address, PAGE, address), f"step {step}: extent {address:#x} was overwritten"
            pool.free(address)
            used -= pool.extent_bytes
        if step % 16 == 0:
            pool.shrink()
        if step % 100_000 == 0:
            arena.check_integrity()
            for each in pools:
                each.check_integrity()
    assert refused > 1000, "the walk never ran short: it proves nothing"
    assert arena.stats.peak_bytes <= limit
    assert sum(pool.used_bytes for pool in pools) == used
    for pool, mine in zip(pools, held, strict=True):
        for address in mine:
            pool.free(address)
        pool.trim()
    arena.check_integrity()
    assert (arena.stats.committed_bytes, arena.resident_bytes()) == (0, 0)
    arena.close()


def test_memory_of_a_256_mb_peak_is_given_back() -> None:
    extent = 188 * PAGE
    with Arena(2**30) as arena:
        pool = make_pool(arena, extent)
        held = [allocate(pool) for _ in range(256 * 10**6 // extent + 1)]
        for address in held:
            write(address, extent, 1)
        assert arena.resident_bytes() >= 256 * 10**6
        for address in held:
            pool.free(address)
        while pool.shrink():
            pass
        assert arena.resident_bytes() <= 4 * extent, "a shrink leaves one chunk of 256 tokens"
        pool.trim()
        assert (arena.resident_bytes(), pool.num_runs, arena.stats.committed_bytes) == (0, 0, 0)


def test_extents_come_one_after_the_other_and_near_their_neighbour() -> None:
    with Arena(64 * MIB) as arena:
        size = 64 * PAGE
        pool = make_pool(arena, size)
        held = [allocate(pool) for _ in range(8)]
        assert held == [held[0] + i * size for i in range(8)]
        for i in (1, 3, 4, 6):
            pool.free(held[i])
        assert pool.allocate(held[2]) == held[3], "right behind"
        assert pool.allocate(held[4]) == held[6], "nearest above"
        assert pool.allocate(held[7]) == held[1], "none above: the lowest"
        pool.free(held[0])
        assert pool.allocate() == held[0], "no neighbour: the lowest"
        assert pool.allocate(held[0]) == held[4]
        grown = pool.stats.growth_events
        assert pool.allocate(held[2]) == held[7] + size, "nothing free: grown at the lowest place"
        assert pool.stats.growth_events == grown + 1


def test_a_neighbour_in_another_pool_or_run_is_understood() -> None:
    with Arena(64 * MIB) as arena:
        low, high = make_pool(arena, 256 * PAGE), make_pool(arena, 256 * PAGE)
        first = [allocate(low) for _ in range(8)]
        other = [allocate(high) for _ in range(8)]
        second = [allocate(low) for _ in range(8)]
        assert first[-1] < other[0] < second[0]
        low.free(first[3])
        low.free(second[2])
        assert low.allocate(other[0]) == second[2], "the next run above the neighbour"
        assert low.allocate(other[0]) == first[3], "and round to the lowest"


def test_growth_goes_in_chunks_and_is_counted() -> None:
    with Arena(64 * MIB) as arena:
        pool = make_pool(arena, PAGE)
        levels = []
        for _ in range(9):
            allocate(pool)
            levels.append(pool.num_free_committed)
        assert levels == [3, 2, 1, 0, 3, 2, 1, 0, 3]
        assert (pool.stats.growth_events, pool.stats.grown_tokens) == (3, 768)
        assert pool.stats.allocated_tokens == 9 * 64
        assert arena.stats.growth_events == 3


def test_reserve_is_one_growth_in_one_stretch() -> None:
    with Arena(64 * MIB) as arena:
        pool = make_pool(arena, 16 * PAGE)
        assert pool.reserve(0)
        assert pool.num_free_committed == 0
        assert pool.reserve(20)
        assert (pool.stats.growth_events, pool.num_free_committed) == (1, 24)
        assert arena.stats.commit_calls == 1
        held = [allocate(pool) for _ in range(20)]
        assert held == [held[0] + i * 16 * PAGE for i in range(20)]
        assert pool.stats.growth_events == 1


def test_shrink_waits_for_its_check_and_leaves_a_chunk() -> None:
    with Arena(64 * MIB) as arena:
        pool = make_pool(arena, PAGE, shrink_check_tokens=64 * 30)
        held = [allocate(pool) for _ in range(24)]
        for address in held[8:13]:
            pool.free(address)
        assert pool.shrink() == 0, "29 extents came and went, less than a check is due for"
        pool.free(held[13])
        assert pool.shrink() == 0, "6 free are within 1.5 chunks"
        for address in held[14:24]:
            pool.free(address)
        assert pool.shrink() == 0, "10 extents since the last check"
        for address in held[:6]:
            pool.free(address)
        for _ in range(14):
            pool.free(allocate(pool))
        assert pool.shrink() == 18 * PAGE
        assert (pool.num_used, pool.num_free_committed) == (2, 4)
        assert (pool.stats.shrink_events, pool.stats.shrunk_tokens) == (1, 18 * 64)


def test_a_large_shrink_goes_on_in_the_next_calls() -> None:
    with Arena(64 * MIB) as arena:
        pool = make_pool(arena, PAGE)
        for address in [allocate(pool) for _ in range(140)]:
            pool.free(address)
        assert [pool.shrink() // PAGE for _ in range(4)] == [64, 64, 8, 0]
        assert (pool.num_free_committed, pool.stats.shrink_events) == (4, 3)


def test_shrink_empties_the_emptiest_run_first() -> None:
    with Arena(64 * MIB) as arena:
        size = 64 * PAGE  # 8 extents in a run of 2 MiB
        pool = make_pool(arena, size)
        held = [allocate(pool) for _ in range(24)]
        assert pool.num_runs == 3
        for address in [*held[8:15], *held[16:19]]:
            pool.free(address)
        assert pool.shrink() == 6 * size
        assert {run.base: run.used.bit_count() for run in pool.occupancy()} == {held[0]: 8, held[8]: 1, held[16]: 5}
        assert pool.num_free_committed == 4
        pool.free(held[15])
        pool.trim()
        assert [run.base for run in pool.occupancy()] == [held[0], held[16]], "an empty run goes back"


def test_short_pools_take_what_others_do_not_use() -> None:
    with Arena(20 * PAGE) as arena:
        one, two = make_pool(arena, PAGE), make_pool(arena, 3 * PAGE)
        held = [allocate(one) for _ in range(20)]
        assert two.allocate() is None
        for address in held[10:12]:
            one.free(address)
        assert two.allocate() is None, "two pages are unused, three are asked"
        assert one.num_free_committed == 2, "taken in vain"
        one.free(held[5])
        assert two.allocate() is not None
        assert one.num_free_committed == 0
        assert (two.stats.refused_allocations, one.stats.reclaimed_extents) == (2, 3)
        assert arena.stats.committed_bytes == 20 * PAGE


def test_headroom_is_never_taken_from_others() -> None:
    with Arena(20 * PAGE) as arena:
        one, two = make_pool(arena, PAGE), make_pool(arena, PAGE)
        held = [allocate(one) for _ in range(16)]
        for address in held[:2]:
            one.free(address)
        for _ in range(4):
            allocate(two)
        assert one.num_free_committed == 2
        allocate(two)
        assert (one.num_free_committed, two.num_free_committed) == (1, 0)
        assert not two.reserve(2)
        assert (one.num_free_committed, two.num_free_committed) == (1, 0)


def test_reserve_keeps_what_the_pool_has_free() -> None:
    with Arena(20 * PAGE) as arena:
        one, two = make_pool(arena, PAGE), make_pool(arena, PAGE)
        assert one.reserve(4)
        other = [allocate(two) for _ in range(16)]
        for address in other[:6]:
            two.free(address)
        assert one.reserve(10)
        assert (one.num_free_committed, two.num_free_committed) == (10, 0)
        assert not one.reserve(11)


def test_a_pool_takes_addresses_that_others_keep_for_nothing() -> None:
    with Arena(4 * MIB, 4 * MIB) as arena:
        one, two = make_pool(arena, 512 * PAGE), make_pool(arena, 256 * PAGE)
        held = [allocate(one), allocate(one)]
        assert two.allocate() is None
        one.free(held[0])  # one empty run: its bytes and its addresses
        assert two.allocate() == held[0]
        one.check_integrity()
        two.check_integrity()


def test_runs_grow_with_the_pool_and_waste_few_addresses() -> None:
    with Arena(2**34) as arena:
        pool = make_pool(arena, 188 * PAGE)
        assert pool.reserve(20_000)
        assert pool.num_runs < 40
        for _ in range(20_000):
            allocate(pool)
        addresses = sum(arena.run_bytes(run.base) for run in pool.occupancy())
        assert addresses <= 1.25 * pool.committed_bytes
        assert max(run.num_slots for run in pool.occupancy()) <= 2048
        assert arena.resident_bytes() == 0


def test_take_allocates_one_place_and_asks_no_other_pool() -> None:
    with Arena(6 * PAGE) as arena:
        one, two = make_pool(arena, PAGE), make_pool(arena, PAGE)
        held = [allocate(one) for _ in range(4)]
        one.free(held[1])
        assert one.take(held[1])
        assert one.take(held[3] + PAGE), "an empty slot is committed"
        assert two.reserve(1)
        assert not one.take(held[3] + 2 * PAGE), "the limit is reached"
        assert two.num_free_committed == 1
        with pytest.raises(AssertionError, match="is in use"):
            one.take(held[1])
        one.check_integrity()


@pytest.mark.parametrize(
    ("freed", "expected"),
    [([], 0.0), ([7], 0.0), ([6, 7], 0.0), ([0], 0.5), ([0, 1, 7], 1 / 3), ([0, 2, 4, 7], 0.75), (list(range(8)), 0.0)],
)
def test_fragmentation_ratio(freed: list[int], expected: float) -> None:
    with Arena(64 * MIB) as arena:
        pool = make_pool(arena, 64 * PAGE)  # one run of 8 extents; slot 7 is freed where the case names others too
        held = [allocate(pool) for _ in range(8)]
        for i in {*freed, 7} if freed == [0] else freed:
            pool.free(held[i])
        assert pool.fragmentation_ratio == pytest.approx(expected)


def test_close_returns_everything() -> None:
    with Arena(64 * MIB) as arena:
        pool = make_pool(arena, PAGE)
        for _ in range(10):
            allocate(pool)
        pool.close()
        assert (pool.num_used, pool.num_runs, arena.stats.committed_bytes) == (0, 0, 0)
        assert arena.charge(64 * MIB)
        arena.check_integrity()


def test_programmer_errors_are_asserts() -> None:
    with Arena(64 * MIB) as arena:
        pool = make_pool(arena, PAGE)
        address = allocate(pool)
        with pytest.raises(AssertionError, match="below every run"):
            pool.free(1)
        with pytest.raises(AssertionError, match="not an extent of this pool"):
            pool.free(address + 64)
        with pytest.raises(AssertionError, match="not an extent of this pool"):
            pool.free(address + 2 * MIB)
        pool.free(address)
        with pytest.raises(AssertionError, match="is not in use"):
            pool.free(address)
        with pytest.raises(AssertionError, match="not a multiple of a page"):
            SlabPool(arena, 100, 64, policy())
        with pytest.raises(AssertionError, match="extent of 0 bytes"):
            SlabPool(arena, 0, 64, policy())
        with pytest.raises(AssertionError, match="extent of 0 tokens"):
            SlabPool(arena, PAGE, 0, policy())


def test_check_integrity_finds_a_wrong_count_and_lost_memory() -> None:
    with Arena(64 * MIB) as arena:
        pool = make_pool(arena, PAGE)
        address = allocate(pool)
        pool.num_used += 1
        with pytest.raises(AssertionError, match="counted 1 used, 3 free"):
            pool.check_integrity()
        pool.num_used -= 1
        arena.decommit(address, PAGE)
        with pytest.raises(AssertionError, match="committed is False"):
            pool.check_integrity()
