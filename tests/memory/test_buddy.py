"""Buddy against a model that derives the free runs from the taken ones by halving the whole again and again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ktransformer2.memory.buddy import Buddy

SIZE, SMALLEST = 64, 2


def free_runs(taken: dict[int, int], offset: int = 0, size: int = SIZE) -> list[tuple[int, int]]:
    """(size, offset) of the largest aligned runs that hold nothing taken: what a buddy allocator must have free."""
    if not any(at < offset + size and offset < at + length for at, length in taken.items()):
        return [(size, offset)]
    if taken.get(offset) == size:
        return []
    half = size // 2
    return free_runs(taken, offset, half) + free_runs(taken, offset + half, half)


class BuddyAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.buddy = Buddy(SIZE, SMALLEST)
        self.taken: dict[int, int] = {}

    @rule(num_bytes=st.integers(1, SIZE + 1))
    def take(self, num_bytes: int) -> None:
        size = next(s for s in (2, 4, 8, 16, 32, 64, 128) if s >= num_bytes)
        fitting = [run for run in free_runs(self.taken) if run[0] >= size]
        expected = min(fitting)[1] if fitting else None
        assert self.buddy.take(num_bytes) == expected
        if expected is not None:
            self.taken[expected] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        assert self.buddy.give_back(offset) == self.taken.pop(offset)

    @invariant()
    def agrees(self) -> None:
        self.buddy.check_integrity()
        assert self.buddy.runs() == sorted(self.taken.items())
        assert self.buddy.largest_free == max((size for size, _ in free_runs(self.taken)), default=0)


BuddyAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBuddyAgainstModel = BuddyAgainstModel.TestCase


def test_runs_merge_into_the_whole_again() -> None:
    buddy = Buddy(16, 2)
    assert [buddy.take(2), buddy.take(4), buddy.take(3), buddy.take(8)] == [0, 4, 8, None]
    for offset in (4, 0, 8):
        buddy.give_back(offset)
    assert buddy.largest_free == 16
    assert buddy.take(16) == 0


def test_a_run_that_nobody_took_cannot_be_given_back() -> None:
    buddy = Buddy(16, 2)
    buddy.take(4)
    with pytest.raises(AssertionError, match="no run begins at offset 0x2"):
        buddy.give_back(2)


def test_sizes_are_powers_of_two() -> None:
    with pytest.raises(AssertionError, match="48 is not a power of two"):
        Buddy(48, 2)
    with pytest.raises(AssertionError, match="above the whole"):
        Buddy(2, 4)


def test_check_integrity_finds_free_buddies_left_apart() -> None:
    buddy = Buddy(16, 2)
    buddy._free = {2: [], 4: [], 8: [0, 8], 16: []}
    with pytest.raises(AssertionError, match="free buddies"):
        buddy.check_integrity()
