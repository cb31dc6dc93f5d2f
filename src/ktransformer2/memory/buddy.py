"""Buddy allocation of power-of-two runs. Numbers only: offsets into a range that somebody else owns.

A run of size 2^k lies at a multiple of 2^k; its buddy is the other half of the run of size 2^(k+1) around it. A free
run whose buddy is free as well is merged with it at once. The lowest address that fits goes first, out of the smallest
size that fits: large runs stay whole, and the same calls give the same addresses.

Invariants: free and taken runs tile the range; no two free buddies exist. Source: Knowlton, A fast storage allocator
(CACM 8, 1965).
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Buddy:
    """Runs between `smallest` and `size`, both powers of two. A call costs O(log) steps and one small list edit."""

    def __init__(self, size: int, smallest: int) -> None:
        for value in (size, smallest):
            assert value.bit_count() == 1, f"{value} is not a power of two"
        assert smallest <= size, f"smallest run {smallest} is above the whole {size}"
        self.size = size
        self.smallest = smallest
        self._taken: dict[int, int] = {}  # offset -> size
        self._free: dict[int, list[int]] = {smallest << k: [] for k in range((size // smallest).bit_length())}
        self._free[size].append(0)  # size -> sorted offsets

    def take(self, num_bytes: int) -> int | None:
        """The offset of a run of at least `num_bytes`; None: no free run is that large."""
        assert num_bytes > 0, f"a run of {num_bytes} bytes"
        wanted = self.run_size(num_bytes)
        size = wanted
        while size <= self.size and not self._free[size]:
            size *= 2
        if size > self.size:
            return None
        offset = self._free[size].pop(0)
        while size > wanted:
            size //= 2
            insort(self._free[size], offset + size)
        self._taken[offset] = wanted
        return offset

    def give_back(self, offset: int) -> int:
        """Free a run and merge it with its free buddies; returns the size it had."""
        assert offset in self._taken, f"no run begins at offset {offset:#x}"
        given = size = self._taken.pop(offset)
        while size < self.size and self._remove_free(offset ^ size, size):
            offset &= ~size
            size *= 2
        insort(self._free[size], offset)
        return given

    def _remove_free(self, offset: int, size: int) -> bool:
        free = self._free[size]
        i = bisect_left(free, offset)
        if i == len(free) or free[i] != offset:
            return False
        del free[i]
        return True

    def run_size(self, num_bytes: int) -> int:
        """The size of the run that holds `num_bytes`."""
        return max(self.smallest, 1 << (num_bytes - 1).bit_length())

    def size_of(self, offset: int) -> int | None:
        """The size of the taken run that begins at `offset`; None: none does."""
        return self._taken.get(offset)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def largest_free(self) -> int:
        """Size of the largest free run; 0 when everything is taken."""
        return max((size for size, free in self._free.items() if free), default=0)

    def runs(self) -> list[tuple[int, int]]:
        """(offset, size) of every taken run, by offset."""
        return sorted(self._taken.items())

    def check_integrity(self) -> None:
        """Recounts: the runs tile the range, and no two free buddies were left apart."""
        tiles = self.runs()
        for size, free in self._free.items():
            assert free == sorted(set(free)), f"free list of {size} is not sorted: {free}"
            for offset in free:
                assert size == self.size or offset ^ size not in free, f"free buddies at {offset:#x}, size {size}"
                tiles.append((offset, size))
        end = 0
        for offset, size in sorted(tiles):
            assert offset == end, f"runs leave a gap or overlap between {end:#x} and {offset:#x}"
            assert offset % size == 0, f"run of {size} at {offset:#x} is not aligned"
            end += size
        assert end == self.size, f"runs cover {end} of {self.size} bytes"
