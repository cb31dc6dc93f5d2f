"""Memory that is read into, and used again by what is read meanwhile. Knows no file.

The system fills fresh memory with zeros page by page, which costs more than to copy a page of a file into it. It copies
faster to where a page begins than to 16 bytes behind it, where `malloc` puts what is large (seen on AMD Zen 3).

Invariants: no part of an area is handed out while a view of it lives, whoever has it; areas are handed out or wait for
their next use, together no more than were ever handed out at once; while nothing is handed out, nothing is held.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
import numpy.typing as npt

_STEP_BYTES = 2**20  # areas of nearly equal transfers fit one another


class ReadMemory:
    """Any thread may take; what it took comes back by itself, from the thread that lets go of it last."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is let go of while it is held comes back under it
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._num_taken = 0

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes, with whatever was there before. Raises: OSError where the machine has none left."""
        area = self._pop(num_bytes)
        if area is None:
            area = _mapped(max(1, -(-num_bytes // _STEP_BYTES)) * _STEP_BYTES)
        part = area[:num_bytes]  # every view of the memoryview holds this array, and so tells when the last is gone
        with self._lock:
            self._num_taken += 1
        weakref.finalize(part, self._give_back, area).atexit = False
        return part.data

    @property
    def spare_bytes(self) -> int:
        """What waits for its next use."""
        with self._lock:
            return sum(area.nbytes for area in self._spare)

    def _pop(self, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        """A spare area that is large enough; smaller ones are let go."""
        with self._lock:
            while self._spare:
                area = self._spare.pop()
                if area.nbytes >= num_bytes:
                    return area
        return None

    def _give_back(self, area: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self._num_taken -= 1
            self._spare.append(area)
            if not self._num_taken:
                self._spare.clear()


def _mapped(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of its own, which the system has back at once: what an allocator keeps would be charged to nobody."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
