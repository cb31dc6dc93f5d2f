"""One run cut into slots of one extent each, and which state every slot is in. Bits only; knows no arena and no byte.

Invariants: a slot is empty (addresses only), free (committed, unused) or used (neither bit set, counted by `num_used`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class RunOccupancy(NamedTuple):
    """Which slots of a run are used: bit i of `used` stands for the extent at base + i * extent_bytes."""

    base: int
    num_slots: int
    used: int

    @property
    def unused(self) -> int:
        return ((1 << self.num_slots) - 1) & ~self.used


class Run:
    """One run: where it begins, and a bit for every slot in each state."""

    __slots__ = ("_longest_unused", "base", "empty", "free", "num_slots", "num_used")

    def __init__(self, base: int, num_slots: int) -> None:
        self.base = base
        self.num_slots = num_slots
        self.num_used = 0
        self.free = 0
        self.empty = (1 << num_slots) - 1
        self._longest_unused = (0, 0)  # the mask that was counted last, and its length

    def longest_unused(self) -> int:
        """Length of the longest stretch of slots that are free or empty; counted again only when the slots changed."""
        unused = self.free | self.empty
        if self._longest_unused[0] != unused:
            self._longest_unused = unused, max(map(len, f"{unused:b}".split("0")))
        return self._longest_unused[1]

    @property
    def used(self) -> int:
        return ((1 << self.num_slots) - 1) & ~(self.free | self.empty)


def lowest_bit(mask: int) -> int:
    """Index of the lowest set bit; the mask is not 0."""
    return (mask & -mask).bit_length() - 1


def set_bits(mask: int) -> Iterator[int]:
    """Indices of the set bits, lowest first."""
    while mask:
        yield lowest_bit(mask)
        mask &= mask - 1
