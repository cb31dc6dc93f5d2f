"""Memory that is read into, whole pages, used again as soon as nobody holds any part of what was read. Knows no file.

The system fills fresh memory with zeros page by page, which costs more than to copy a page of a file into it. It copies
up to twice as fast to where a page begins as to 16 bytes behind it, where `malloc` puts what is large (AMD Zen 3).

Invariants: no part of an area is handed out while a view of it lives, whoever has it; while nothing is handed out, at
most `SPARE_BYTES` wait for their next use.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import numpy.typing as npt

SPARE_BYTES = 20 * 2**20  # two transfers of a cache, whose slices have 8 MB and the headers between their payloads
_PAGE_BYTES = 4096
_STEP_BYTES = 2**20  # areas of nearly equal transfers fit one another


class ReadMemory:
    """Any thread may take; what it took comes back by itself, from the thread that lets go of it last."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is let go of while it is held comes back under it
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._num_taken = 0

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes, with whatever was there before. Raises: MemoryError."""
        area = self._pop(num_bytes)
        if area is None:
            area = _whole_pages(-(-num_bytes // _STEP_BYTES) * _STEP_BYTES)
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
            while not self._num_taken and self.spare_bytes > SPARE_BYTES:
                self._spare.pop()


def _whole_pages(num_bytes: int) -> npt.NDArray[np.uint8]:
    around = np.empty(num_bytes + _PAGE_BYTES, np.uint8)
    start = -around.ctypes.data % _PAGE_BYTES
    return around[start : start + num_bytes]
