"""The planner of moves: exact plans, and a state machine that carries plans out and looks at the bytes."""

from __future__ import annotations

import ctypes

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ktransformer2.memory import Arena, Move, SlabPool, plan_moves
from tests.memory.factories import MIB, PAGE, allocate, holds, make_pool, write

SIZE = 64 * PAGE  # 8 extents in a run of 2 MiB
UNLIMITED = 2**40


def pool_with(arena: Arena, *runs: str) -> tuple[SlabPool, list[int]]:
    """A pool whose runs look like `"x..x"`: used and free slots. And the addresses of all slots, in order."""
    pool = make_pool(arena, SIZE)
    held = [allocate(pool) for _ in range(8 * len(runs))]
    for address, state in zip(held, "".join(runs), strict=True):
        if state == ".":
            pool.free(address)
    return pool, held


def picture(pool: SlabPool) -> list[str]:
    return ["".join("x" if run.used >> slot & 1 else "." for slot in range(run.num_slots)) for run in pool.occupancy()]


def carry_out(pool: SlabPool, moves: list[Move]) -> None:
    for move in moves:
        ctypes.memmove(move.destination, move.source, move.num_bytes)
    for move in moves:
        pool.free(move.source)


def test_the_emptiest_run_fills_the_holes_of_the_fullest() -> None:
    with Arena(64 * MIB) as arena:
        pool, at = pool_with(arena, "x.x.....", "xxxxx.xx", "xxxx.xxx")
        moves = plan_moves(pool, UNLIMITED)
        assert moves == [Move(at[0], at[13], SIZE), Move(at[2], at[20], SIZE)]
        carry_out(pool, moves)
        assert picture(pool) == ["........", "xxxxxxxx", "xxxxxxxx"]
        assert pool.fragmentation_ratio == 0
        pool.trim()
        assert [run.base for run in pool.occupancy()] == [at[8], at[16]], "the emptied run goes back"
        assert plan_moves(pool, UNLIMITED) == []


def test_one_run_is_packed_at_its_low_end_in_the_same_order() -> None:
    with Arena(64 * MIB) as arena:
        pool, at = pool_with(arena, "x..x.xx.")
        moves = plan_moves(pool, UNLIMITED)
        assert moves == [Move(at[5], at[1], SIZE), Move(at[6], at[2], SIZE)]
        carry_out(pool, moves)
        assert picture(pool) == ["xxxx...."]


def test_the_budget_bounds_the_bytes_and_the_next_call_goes_on() -> None:
    with Arena(64 * MIB) as arena:
        pool, _ = pool_with(arena, "x.x.x.x.", "x.xxxxxx", "x.xx.xxx")
        pictures = []
        for _ in range(4):
            moves = plan_moves(pool, 2 * SIZE - 1)
            assert len(moves) <= 1
            carry_out(pool, moves)
            pictures.append(picture(pool))
        assert pictures == [
            ["x.x.x...", "xxxxxxxx", "x.xx.xxx"],
            ["x.x.....", "xxxxxxxx", "xxxx.xxx"],
            ["x.......", "xxxxxxxx", "xxxxxxxx"],
            ["x.......", "xxxxxxxx", "xxxxxxxx"],
        ]
        assert plan_moves(pool, SIZE - 1) == []


def test_destinations_are_taken_and_an_abandoned_plan_leaves_nothing() -> None:
    with Arena(64 * MIB) as arena:
        pool, _ = pool_with(arena, "x.x.....", "xxxxx.xx")
        before = picture(pool)
        moves = plan_moves(pool, UNLIMITED)
        assert pool.num_used == 9 + len(moves)
        for move in moves:
            pool.free(move.destination)
        assert picture(pool) == before
        pool.check_integrity()


def test_an_extent_goes_behind_its_predecessor() -> None:
    with Arena(64 * MIB) as arena:
        pool, at = pool_with(arena, "xx......", "x.xx.xxx")
        # By address at[0] would go to at[9]; the sequence reads at[8] then at[1], and at[11] then at[0].
        moves = plan_moves(pool, UNLIMITED, chains=[[at[8], at[1]], [at[11], at[0]]])
        assert moves == [Move(at[0], at[12], SIZE), Move(at[1], at[9], SIZE)]


def test_a_whole_chain_that_moves_stays_together() -> None:
    with Arena(64 * MIB) as arena:
        pool, at = pool_with(arena, "xxx.....", "x...xxxx")
        moves = plan_moves(pool, UNLIMITED, chains=[[at[8], at[2], at[0], at[1]]])
        assert moves == [Move(at[0], at[10], SIZE), Move(at[1], at[11], SIZE), Move(at[2], at[9], SIZE)]


def test_no_plan_passes_the_limit() -> None:
    with Arena(20 * SIZE) as arena:
        pool, at = pool_with(arena, "xx......", "x.xx.xxx")
        pool.trim()  # the holes are addresses only now
        assert arena.charge(arena.free_bytes - SIZE)
        moves = plan_moves(pool, UNLIMITED)
        assert moves == [Move(at[1], at[9], SIZE)], "one extent fits, so one hole is filled"
        assert arena.free_bytes == 0
        carry_out(pool, moves)
        pool.trim()
        assert plan_moves(pool, UNLIMITED) == [Move(at[0], at[12], SIZE)]


class DefragKeepsBytes(RuleBasedStateMachine):
    """Sequences of extents that come, go and are moved; each extent carries its own mark."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(60 * SIZE)
        self.pool = make_pool(self.arena, SIZE)
        self.sequences: list[list[tuple[int, int]]] = []  # of (address, mark)
        self.next_mark = 1

    @rule(num_extents=st.integers(1, 12))
    def begin(self, num_extents: int) -> None:
        sequence: list[tuple[int, int]] = []
        while len(sequence) < num_extents:
            address = self.pool.allocate(sequence[-1][0] if sequence else 0)
            if address is None:
                break
            write(address, SIZE, self.next_mark)
            sequence.append((address, self.next_mark))
            self.next_mark += 1
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        for address, _ in self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1))):
            self.pool.free(address)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), keep=st.integers(0, 6))
    def shorten(self, data: st.DataObject, keep: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        while len(sequence) > keep:
            self.pool.free(sequence.pop()[0])

    @rule()
    def shrink(self) -> None:
        self.pool.shrink()

    @rule(num_moves=st.integers(0, 5), with_order=st.booleans())
    def defragment(self, num_moves: int, with_order: bool) -> None:
        used, runs = self.pool.num_used, self.runs_in_use()
        chains = [[address for address, _ in sequence] for sequence in self.sequences] if with_order else []
        moves = plan_moves(self.pool, num_moves * SIZE, chains)
        assert len(moves) <= num_moves
        assert not {move.source for move in moves} & {move.destination for move in moves}
        self.apply(moves)
        assert self.pool.num_used == used
        assert self.runs_in_use() <= runs

    @rule()
    def defragment_without_a_bound(self) -> None:
        self.apply(plan_moves(self.pool, UNLIMITED))
        if self.arena.free_bytes < SIZE:
            return  # holes that are addresses only could not be filled
        self.apply(plan_moves(self.pool, UNLIMITED))
        if self.arena.free_bytes >= SIZE:
            assert self.pool.fragmentation_ratio == 0
            assert plan_moves(self.pool, UNLIMITED) == []
            partial = [run for run in self.pool.occupancy() if 0 < run.used.bit_count() < run.num_slots]
            assert len(partial) <= 1

    def runs_in_use(self) -> int:
        return sum(run.used != 0 for run in self.pool.occupancy())

    def apply(self, moves: list[Move]) -> None:
        carry_out(self.pool, moves)
        moved = {move.source: move.destination for move in moves}
        self.sequences = [[(moved.get(address, address), mark) for address, mark in s] for s in self.sequences]

    @invariant()
    def bytes_are_intact(self) -> None:
        self.pool.check_integrity()
        self.arena.check_integrity()
        assert self.pool.num_used == sum(map(len, self.sequences))
        assert all(holds(address, SIZE, mark) for sequence in self.sequences for address, mark in sequence)

    def teardown(self) -> None:
        self.arena.close()


DefragKeepsBytes.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestDefragKeepsBytes = DefragKeepsBytes.TestCase
