"""A set of numbers held as disjoint half-open ranges. Pure; knows not what the numbers mean.

Invariants: ranges are sorted, not empty, and never touch (neighbours are merged); `total` is the sum of their lengths.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeSet:
    """Adding what is there, or removing what is not, is a programmer error. Look-ups cost O(log ranges)."""

    def __init__(self) -> None:
        self.total = 0
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    def around(self, start: int, stop: int) -> tuple[int, int] | None:
        """The one range that holds all of [start, stop), or None."""
        i = bisect_right(self._starts, start) - 1
        return (self._starts[i], self._stops[i]) if i >= 0 and stop <= self._stops[i] else None

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any number of [start, stop) is in the set."""
        i = bisect_left(self._starts, stop) - 1
        return start < stop and i >= 0 and self._stops[i] > start

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What the set holds of [start, stop)."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_left(self._starts, stop)
        cut = ((max(start, self._starts[i]), min(stop, self._stops[i])) for i in range(first, last))
        return [(low, high) for low, high in cut if low < high]

    def add(self, start: int, stop: int) -> tuple[int, int]:
        """Take [start, stop) in; returns the range it is part of now."""
        assert start < stop, f"empty range {start:#x}:{stop:#x}"
        assert not self.overlaps(start, stop), f"{start:#x}:{stop:#x} is in the set already: {self.within(start, stop)}"
        self.total += stop - start
        i = bisect_left(self._starts, start)
        joins_left = i > 0 and self._stops[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == stop
        if joins_left and joins_right:
            self._stops[i - 1] = self._stops.pop(i)
            del self._starts[i]
            return self._starts[i - 1], self._stops[i - 1]
        if joins_left:
            self._stops[i - 1] = stop
            return self._starts[i - 1], stop
        if joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._stops.insert(i, stop)
        return start, self._stops[i]

    def remove(self, start: int, stop: int) -> None:
        """Take [start, stop) out; all of it must be in the set."""
        i = bisect_right(self._starts, start) - 1
        assert start < stop, f"empty range {start:#x}:{stop:#x}"
        assert self.around(start, stop) is not None, f"{start:#x}:{stop:#x} is not all in the set"
        self.total -= stop - start
        low, high = self._starts[i], self._stops[i]
        kept = [part for part in ((low, start), (stop, high)) if part[0] < part[1]]
        self._starts[i : i + 1] = [part[0] for part in kept]
        self._stops[i : i + 1] = [part[1] for part in kept]

    def check_integrity(self) -> None:
        assert len(self._starts) == len(self._stops), f"{len(self._starts)} starts, {len(self._stops)} stops"
        assert self.total == sum(stop - start for start, stop in self), (
            f"total {self.total} is not the sum of the ranges"
        )
        end = None
        for start, stop in self:
            assert start < stop, f"empty range at {start:#x}"
            assert end is None or end < start, f"ranges touch or overlap at {start:#x}"
            end = stop
