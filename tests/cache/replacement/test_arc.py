"""ARC's four cases, as figure 4 of the paper numbers them, on traces worked out by hand."""

from __future__ import annotations

from ktransformer2.cache.replacement.arc import ARC
from tests.cache.replacement.keyed import Keyed


class Bed(Keyed):
    """Three keys under ARC."""

    def __init__(self) -> None:
        self.arc = ARC()
        super().__init__(self.arc, 3)

    def lists(self) -> tuple[list[object], ...]:
        """T1, T2, B1, B2 in keys, the least recently used first."""
        arc = self.arc
        return [e.key for e in arc._t1], [e.key for e in arc._t2], [*arc._b1], [*arc._b2]


def after_case_two() -> Bed:
    bed = Bed()
    bed.touch(1, 2, 3, 2, 4, 1)
    return bed


def test_case_one_moves_what_is_seen_again_to_t2() -> None:
    bed = Bed()
    bed.touch(1, 2, 3)
    assert bed.lists() == ([1, 2, 3], [], [], [])
    bed.touch(2)
    assert bed.lists() == ([1, 3], [2], [], [])
    bed.touch(1, 2)
    assert bed.lists() == ([3], [1, 2], [], []), "a hit in T2 moves to its young end"


def test_case_four_replaces_the_oldest_of_t1_while_that_passes_its_target() -> None:
    bed = Bed()
    bed.touch(1, 2, 3, 2, 4)
    assert bed.lists() == ([3, 4], [2], [1], [])
    assert bed.arc._p == 0


def test_case_two_widens_t1_and_takes_the_ghost_of_b1_to_t2() -> None:
    bed = after_case_two()
    assert bed.lists() == ([4], [2, 1], [3], []), "3 had to go for 1, which was a ghost of B1"
    assert bed.arc._p == 1, "p + max(1, |B2| / |B1|)"


def test_case_three_narrows_t1_by_as_much_as_b1_is_longer() -> None:
    bed = after_case_two()
    bed.touch(5)
    assert bed.lists() == ([4, 5], [1], [3], [2]), "|T1| was not above p = 1, so T2 gave 2"
    bed.touch(2)
    assert bed.lists() == ([5], [1, 2], [3, 4], [])
    assert bed.arc._p == 0, "p - max(1, |B1| / |B2|) = 1 - 2, at least 0"


def test_case_four_forgets_ghosts_of_b1_beyond_c_and_of_b2_beyond_2c() -> None:
    bed = after_case_two()
    bed.touch(5, 2, 6)
    assert bed.lists() == ([6], [1, 2], [4, 5], []), "|T1| + |B1| = c: 3 is forgotten"
    bed.touch(6, 7)
    assert bed.lists() == ([7], [2, 6], [4, 5], [1])
    bed.touch(7, 8)
    assert bed.lists() == ([8], [6, 7], [4, 5], [2]), "2c keys in all: 1 is forgotten"


def test_what_is_in_use_counts_for_t1_and_does_not_leave() -> None:
    bed = Bed()
    held = bed.admit(1)
    bed.touch(2, 3, 3, 4)
    assert bed.lists() == ([4], [3], [2], []), "1 is held; |T1| is 2"
    bed.touch(5)
    assert bed.lists() == ([5], [3], [2, 4][1:], []), "|T1| + |B1| counts the one held"
    bed.retention.release(held)
    assert bed.lists() == ([5, 1], [3], [4], [])


def test_what_lost_its_content_leaves_no_ghost() -> None:
    bed = Bed()
    bed.touch(1, 2)
    bed.retention.forget(bed.entry(1))
    assert bed.lists() == ([2], [], [], [])
