"""RangeSet against a set of integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformer2.memory.ranges import RangeSet

spans = st.tuples(st.integers(0, 39), st.integers(1, 8)).map(lambda span: (span[0], span[0] + span[1]))


def as_ranges(numbers: set[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive numbers."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    stops = sorted(n + 1 for n in numbers if n + 1 not in numbers)
    return list(zip(starts, stops, strict=True))


@given(st.lists(spans, max_size=40), spans)
def test_agrees_with_a_set_of_integers(steps: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    ranges, numbers = RangeSet(), set[int]()
    for start, stop in steps:
        span = set(range(start, stop))
        if not span & numbers:
            numbers |= span
            low, high = ranges.add(start, stop)
            assert (low, high) in as_ranges(numbers)
            assert low <= start < stop <= high
        elif span <= numbers:
            numbers -= span
            ranges.remove(start, stop)
        assert list(ranges) == as_ranges(numbers)
        assert ranges.total == len(numbers)
        ranges.check_integrity()
    wanted = set(range(*asked))
    assert ranges.overlaps(*asked) == bool(wanted & numbers)
    assert (ranges.around(*asked) is not None) == (wanted <= numbers)
    assert ranges.within(*asked) == as_ranges(wanted & numbers)


def test_adding_twice_and_removing_what_is_not_there_are_programmer_errors() -> None:
    ranges = RangeSet()
    ranges.add(0, 8)
    with pytest.raises(AssertionError, match="in the set already"):
        ranges.add(7, 9)
    with pytest.raises(AssertionError, match="not all in the set"):
        ranges.remove(4, 9)
    with pytest.raises(AssertionError, match="empty range"):
        ranges.add(9, 9)


def test_an_empty_question_overlaps_nothing() -> None:
    ranges = RangeSet()
    ranges.add(0, 8)
    assert not ranges.overlaps(4, 4)


def test_check_integrity_finds_a_wrong_total_and_ranges_that_touch() -> None:
    ranges = RangeSet()
    ranges.add(0, 8)
    ranges.total = 9
    with pytest.raises(AssertionError, match="total 9"):
        ranges.check_integrity()
    ranges.total = 10
    ranges._starts.append(8)
    ranges._stops.append(10)
    with pytest.raises(AssertionError, match="touch or overlap"):
        ranges.check_integrity()
