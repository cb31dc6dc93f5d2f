"""The arena: the limit, what the system sees, huge pages, and a state machine against a model of single pages."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ktransformer2.errors import ConfigError, OutOfMemoryError
from ktransformer2.memory import Arena
from ktransformer2.memory import arena as arena_module
from ktransformer2.memory.mapping import Mapping, huge_page_bytes
from tests.memory.factories import MIB, PAGE, holds, write

LIMIT = 64 * PAGE


class Hoard:
    """Committed memory that nobody needs, given back in pieces."""

    def __init__(self, arena: Arena, num_bytes: int, piece: int = PAGE) -> None:
        self.arena, self.piece, self.reclaimable_bytes = arena, piece, num_bytes
        run = arena.allocate_run(num_bytes)
        assert run is not None
        assert arena.commit(run, num_bytes)
        self.run = run
        arena.register(self)

    def give_back(self, num_bytes: int) -> int:
        given = min(-(-num_bytes // self.piece) * self.piece, self.reclaimable_bytes)
        self.reclaimable_bytes -= given
        self.arena.decommit(self.run + self.reclaimable_bytes, given)
        return given


class ArenaAgainstModel(RuleBasedStateMachine):
    """Every committed page carries its own mark; the model is a dict from page to mark."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(LIMIT, 16 * MIB)
        self.runs: dict[int, int] = {}
        self.marks: dict[int, int] = {}
        self.charged = 0
        self.next_mark = 1

    @rule(megabytes=st.integers(1, 9))
    def allocate_run(self, megabytes: int) -> None:
        run = self.arena.allocate_run(megabytes * MIB)
        if run is not None:
            self.runs[run] = self.arena.run_bytes(run)
            assert self.runs[run] >= megabytes * MIB

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), first=st.integers(0, 600), count=st.integers(1, 40))
    def commit(self, data: st.DataObject, first: int, count: int) -> None:
        run = data.draw(st.sampled_from(sorted(self.runs)))
        pages = range(run + first * PAGE, run + min((first + count) * PAGE, self.runs[run]), PAGE)
        if not pages or any(page in self.marks for page in pages):
            return
        fits = (len(self.marks) + len(pages)) * PAGE + self.charged <= LIMIT
        assert self.arena.commit(pages[0], len(pages) * PAGE) == fits
        if fits:
            for page in pages:
                assert holds(page, PAGE, 0), "newly committed memory is not zero"
                self.marks[page] = self.next_mark
                write(page, PAGE, self.next_mark)
                self.next_mark += 1

    @precondition(lambda self: self.marks)
    @rule(data=st.data(), count=st.integers(1, 40))
    def decommit(self, data: st.DataObject, count: int) -> None:
        first = data.draw(st.sampled_from(sorted(self.marks)))
        count = next(n for n in range(1, count + 1) if n == count or first + n * PAGE not in self.marks)
        self.arena.decommit(first, count * PAGE)
        for page in range(first, first + count * PAGE, PAGE):
            del self.marks[page]

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def free_run(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.runs)))
        if not any(run <= page < run + self.runs[run] for page in self.marks):
            self.arena.free_run(run)
            del self.runs[run]

    @rule(num_bytes=st.integers(0, LIMIT))
    def charge(self, num_bytes: int) -> None:
        fits = len(self.marks) * PAGE + self.charged + num_bytes <= LIMIT
        assert self.arena.charge(num_bytes) == fits
        self.charged += num_bytes if fits else 0

    @rule(share=st.floats(0, 1))
    def discharge(self, share: float) -> None:
        self.arena.discharge(int(self.charged * share))
        self.charged -= int(self.charged * share)

    @invariant()
    def agrees(self) -> None:
        self.arena.check_integrity()
        stats = self.arena.stats
        assert (stats.committed_bytes, stats.charged_bytes) == (len(self.marks) * PAGE, self.charged)
        assert self.arena.free_bytes == LIMIT - len(self.marks) * PAGE - self.charged
        assert all(holds(page, PAGE, mark) for page, mark in self.marks.items())

    def teardown(self) -> None:
        assert self.arena.resident_bytes() == len(self.marks) * PAGE
        self.arena.close()


ArenaAgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestArenaAgainstModel = ArenaAgainstModel.TestCase


def test_nothing_passes_the_limit_and_charges_count_with_it() -> None:
    with Arena(10 * PAGE) as arena:
        run = arena.allocate_run(MIB)
        assert run is not None
        assert arena.commit(run, 6 * PAGE)
        assert not arena.charge(4 * PAGE + 1)
        assert arena.charge(4 * PAGE)
        assert not arena.commit(run + 6 * PAGE, PAGE)
        arena.discharge(PAGE)
        assert arena.commit(run + 6 * PAGE, PAGE)
        assert not arena.charge(1)
        assert arena.stats.peak_bytes == 10 * PAGE
        assert (arena.stats.refused_commits, arena.stats.refused_charges) == (1, 2)


def test_the_system_sees_what_is_given_back() -> None:
    with Arena(64 * MIB) as arena:
        run = arena.allocate_run(48 * MIB)
        assert run is not None
        assert arena.commit(run, 48 * MIB)
        assert arena.resident_bytes() == 0
        ctypes.memset(run, 1, 48 * MIB)
        assert arena.resident_bytes() == 48 * MIB
        arena.decommit(run + 3 * MIB, 40 * MIB)
        assert arena.resident_bytes() == 8 * MIB
        arena.decommit(run, 3 * MIB)
        arena.decommit(run + 43 * MIB, 5 * MIB)
        assert arena.resident_bytes() == 0
        arena.free_run(run)


@pytest.mark.skipif(not huge_page_bytes(), reason="the system has no transparent huge pages")
def test_only_wholly_committed_units_are_huge() -> None:
    unit = huge_page_bytes()
    with Arena(8 * unit) as arena:
        run = arena.allocate_run(4 * unit)
        assert run is not None
        assert arena.commit(run, unit + PAGE)
        assert arena.stats.huge_page_calls == 1
        ctypes.c_uint8.from_address(run + unit).value = 1
        assert arena.resident_bytes() == PAGE, "one touched byte of a partly used unit took more than its page"
        assert arena.commit(run + unit + PAGE, unit - PAGE)
        assert arena.stats.huge_page_calls == 2
        assert arena.resident_bytes() == (unit if arena.stats.collapsed_huge_pages else PAGE)
        assert ctypes.c_uint8.from_address(run + unit).value == 1
        arena.decommit(run + 2 * unit - PAGE, PAGE)
        assert arena.resident_bytes() <= unit - PAGE
        ctypes.c_uint8.from_address(run).value = 1  # the unit before it is still whole
        assert arena.resident_bytes() <= 2 * unit - PAGE
        arena.check_integrity()


def test_works_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "huge_page_bytes", lambda: 0)
    with Arena(8 * MIB) as arena:
        run = arena.allocate_run(4 * MIB)
        assert run is not None
        assert arena.commit(run, 4 * MIB)
        ctypes.memset(run, 1, PAGE)
        assert (arena.stats.huge_page_calls, arena.resident_bytes()) == (0, PAGE)
        arena.decommit(run, 4 * MIB)
        assert arena.resident_bytes() == 0


def test_a_system_page_shared_by_two_commits_goes_when_both_are_gone() -> None:
    with Arena(8 * MIB) as arena:
        arena._mapping.page_bytes = 4 * PAGE  # as on systems with pages of 16 KiB
        run = arena.allocate_run(MIB)
        assert run is not None
        for i in range(12):
            assert arena.commit(run + i * PAGE, PAGE)
            write(run + i * PAGE, PAGE, i + 1)
        arena.decommit(run + 2 * PAGE, 7 * PAGE)  # pages 2..8: only the middle system page (4..7) is free of others
        assert arena.resident_bytes() == 8 * PAGE
        assert all(holds(run + i * PAGE, PAGE, i + 1) for i in (0, 1, 9, 10, 11))
        arena.decommit(run, 2 * PAGE)
        assert arena.resident_bytes() == 4 * PAGE
        arena.decommit(run + 9 * PAGE, 3 * PAGE)
        assert arena.resident_bytes() == 0


def test_holders_give_back_before_anything_is_refused() -> None:
    with Arena(16 * PAGE) as arena:
        small, large = Hoard(arena, 4 * PAGE), Hoard(arena, 10 * PAGE, piece=3 * PAGE)
        assert arena.charge(3 * PAGE)  # 2 are free; the larger hoard gives one piece
        assert (small.reclaimable_bytes, large.reclaimable_bytes) == (4 * PAGE, 7 * PAGE)
        assert not arena.make_room(10 * PAGE, besides=large), "asked for more than the others hold"
        assert (small.reclaimable_bytes, large.reclaimable_bytes) == (4 * PAGE, 7 * PAGE), "asked in vain"
        assert arena.charge(13 * PAGE)
        assert (small.reclaimable_bytes, large.reclaimable_bytes) == (0, 0)
        assert not arena.charge(1)
        assert arena.stats.reclaimed_bytes == 14 * PAGE
        arena.unregister(small)
        arena.unregister(large)
        arena.check_integrity()


def test_a_strict_system_gets_a_smaller_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def strict(num_bytes: int, alignment: int) -> Mapping:
        asked.append(num_bytes)
        if num_bytes > 16 * MIB:
            raise OutOfMemoryError("refused")
        return Mapping(num_bytes, alignment)

    monkeypatch.setattr(arena_module, "Mapping", strict)
    with Arena(12 * MIB) as arena:
        assert asked == [128 * MIB, 64 * MIB, 32 * MIB, 16 * MIB]
        assert arena.stats.reserved_bytes == 16 * MIB
    with pytest.raises(OutOfMemoryError, match="refused"):
        Arena(12 * MIB, 20 * MIB)
    with pytest.raises(OutOfMemoryError, match="refused"):
        Arena(20 * MIB)


def test_no_addresses_is_a_return_value() -> None:
    with Arena(MIB, 4 * MIB) as arena:
        first = arena.allocate_run(4 * MIB)
        assert first is not None
        assert arena.allocate_run(1) is None
        arena.free_run(first)
        assert arena.allocate_run(4 * MIB + 1) is None
        assert arena.allocate_run(1) == first


@pytest.mark.parametrize(
    ("limit", "reserve", "message"),
    [
        (0, None, "limit_bytes=0 "),
        (-1, None, "limit_bytes=-1 "),
        (2**46 + PAGE, None, f"limit_bytes={2**46 + PAGE} is not allowed; allowed: 4096 to {2**46}"),
        (2**61, None, f"limit_bytes={2**61} "),
        (8 * MIB, 4 * MIB, "reserve_bytes=4194304 "),
        (8 * MIB, 2**64, f"reserve_bytes={2**64} is not allowed; allowed: limit_bytes={8 * MIB} to {2**49}"),
    ],
)
def test_a_limit_that_makes_no_sense_is_a_typed_error(limit: int, reserve: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arena(limit, reserve)


def test_programmer_errors_are_asserts() -> None:
    with Arena(8 * MIB) as arena:
        run = arena.allocate_run(MIB)
        assert run is not None
        assert arena.commit(run, PAGE)
        with pytest.raises(AssertionError, match="not multiples of a page"):
            arena.commit(run + PAGE, 100)
        with pytest.raises(AssertionError, match="outside the arena"):
            arena.commit(run - PAGE, PAGE)
        with pytest.raises(AssertionError, match="in the set already"):
            arena.commit(run, PAGE)
        with pytest.raises(AssertionError, match="not all in the set"):
            arena.decommit(run, 2 * PAGE)
        with pytest.raises(AssertionError, match="still holds committed memory"):
            arena.free_run(run)
        with pytest.raises(AssertionError, match="discharge 1 of 0"):
            arena.discharge(1)
        assert arena.commit(run + PAGE, PAGE), "a refused call left something behind"
        arena.check_integrity()


def test_check_integrity_finds_a_wrong_count_and_memory_outside_runs() -> None:
    with Arena(8 * MIB) as arena:
        run = arena.allocate_run(MIB)
        assert run is not None
        assert arena.commit(run, PAGE)
        arena.stats.committed_bytes += PAGE
        with pytest.raises(AssertionError, match="8192 != 4096"):
            arena.check_integrity()
        arena.stats.committed_bytes -= PAGE
        arena._buddy.give_back(0)
        with pytest.raises(AssertionError, match="not all in taken runs"):
            arena.check_integrity()
