"""Memory comes back when the last view of it is gone, not earlier, and none of it is kept when reading is over."""

from __future__ import annotations

from ktransformer2.tiers.read_memory import ReadMemory

MB = 2**20


def test_memory_is_used_again_once_nobody_holds_a_part_of_it() -> None:
    memory = ReadMemory()
    meanwhile, taken = memory.take(MB), memory.take(3 * MB)
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
    assert meanwhile.nbytes == MB


def test_so_many_bytes_are_taken_and_can_be_written_to() -> None:
    taken = ReadMemory().take(1000)
    assert (taken.nbytes, taken.readonly, taken.format) == (1000, False, "B")
    assert ReadMemory().take(0).nbytes == 0


def test_what_is_too_small_is_let_go() -> None:
    memory = ReadMemory()
    meanwhile = memory.take(MB)
    memory.take(MB)
    assert memory.spare_bytes == MB
    assert memory.take(2 * MB).nbytes == 2 * MB
    assert memory.spare_bytes == 2 * MB
    assert meanwhile.nbytes == MB


def test_nothing_is_kept_while_nothing_is_read() -> None:
    memory = ReadMemory()
    taken = [memory.take(9 * MB) for _ in range(5)]
    del taken[1:]
    assert memory.spare_bytes == 36 * MB, "reading goes on"
    taken.clear()
    assert memory.spare_bytes == 0
