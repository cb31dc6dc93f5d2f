"""Memory comes back when the last view of it is gone, not earlier, and not more of it is kept than is promised."""

from __future__ import annotations

import numpy as np

from ktransformer2.tiers.read_memory import SPARE_BYTES, ReadMemory

MB = 2**20


def test_memory_is_used_again_once_nobody_holds_a_part_of_it() -> None:
    memory = ReadMemory()
    taken = memory.take(3 * MB)
    taken[:5] = b"first"
    part, rest = taken[:5], taken[5:]
    del taken, rest
    assert memory.spare_bytes == 0
    other = memory.take(3 * MB)
    other[:5] = b"other"
    assert bytes(part) == b"first"
    del part
    assert memory.spare_bytes == 3 * MB
    assert bytes(memory.take(2 * MB + 1)[:5]) == b"first", "the same memory, for what is a little smaller"


def test_so_many_bytes_are_taken_and_can_be_written_to() -> None:
    taken = ReadMemory().take(1000)
    assert (taken.nbytes, taken.readonly, taken.format) == (1000, False, "B")
    assert ReadMemory().take(0).nbytes == 0


def test_memory_begins_with_a_page() -> None:
    for num_bytes in (1, 1000, 3 * MB + 1):
        assert np.frombuffer(ReadMemory().take(num_bytes), np.uint8).ctypes.data % 4096 == 0


def test_what_is_too_small_is_let_go() -> None:
    memory = ReadMemory()
    memory.take(MB)
    assert memory.spare_bytes == MB
    assert memory.take(2 * MB).nbytes == 2 * MB
    assert memory.spare_bytes == 2 * MB


def test_little_is_kept_while_nothing_is_read() -> None:
    memory = ReadMemory()
    taken = [memory.take(9 * MB) for _ in range(5)]
    del taken[1:]
    assert memory.spare_bytes == 36 * MB, "reading goes on"
    taken.clear()
    assert memory.spare_bytes == 18 * MB <= SPARE_BYTES
    memory.take(SPARE_BYTES + 1)
    assert memory.spare_bytes == 0, "too large to be kept, and the others were too small"
