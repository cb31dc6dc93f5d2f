"""Records come out of segments, as fast as the files can be read from beginning to end.

    announced   what comes next, so that the disk works while what came is looked at
    read        neighbours in one call, a piece at a time: the receiver finds it in the processor's cache
    placed      header and payload together, into memory that was used before: no copy, and no page fault

Knows no index and no key; says nothing of whether a record is what it should be. Every call opens the file anew, as all
that touch segments do.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ktransformer2.tiers.header import BlockHeader
from ktransformer2.tiers.read_memory import ReadMemory
from ktransformer2.tiers.segments import PAGE_BYTES, Place, adjacent, opened

PIECE_BYTES = 2 * 2**20
_AHEAD_BYTES = 8 * 2**20  # behind what is asked for, and no more than twice that: one block announces little
_ANNOUNCED_BYTES = 2**19  # of one call: a system cuts it to its own window, 1/2 to 8 MB


@dataclass(frozen=True)
class Record:
    """What was read: a header, if there is one, and a payload that is yet to be believed."""

    header: BlockHeader | None
    payload: memoryview = field(repr=False)


def read(
    directory: Path, places: Collection[Place], memory: ReadMemory, failed: Callable[[OSError], None]
) -> Iterator[list[tuple[Place, Record]]]:
    """The records at those places in the order in which they lie, those of one call together, as soon as they came.

    What lies behind a file's end reads as zeros. Records of a call that fails are left out, and `failed` is told why.
    """
    whole = sum(place.num_bytes for place in places)
    ahead = min(_AHEAD_BYTES, 2 * whole)
    try:
        left = memory.take(whole)
    except MemoryError:
        failed(OSError(errno.ENOMEM, f"no memory for {whole} bytes"))
        return
    announced = Place(-1, 0, 0)  # up to where
    for piece in adjacent(places, PIECE_BYTES):
        segment, first, end = piece[0].segment, piece[0].offset, piece[-1].end
        here, left = left[: end - first], left[end - first :]
        start = max(first, announced.offset) if announced.segment == segment else first
        announced = Place(segment, end + ahead, 0)
        try:
            with opened(directory, segment, os.O_RDONLY) as descriptor:
                _announce(descriptor, start, announced.offset)
                _fill(descriptor, here, first)
        except OSError as error:
            failed(error)
            continue
        yield [(place, _record(here, place, first)) for place in piece]


def _record(memory: memoryview, place: Place, first: int) -> Record:
    start = place.offset - first + PAGE_BYTES
    header = BlockHeader.unpack(memory[start - PAGE_BYTES : start])
    return Record(header, memory[start : start + place.payload_bytes])


def _fill(descriptor: int, memory: memoryview, offset: int) -> None:
    """Read until the memory is full or the file ends; zeros behind that."""
    while memory.nbytes and (came := os.preadv(descriptor, [memory], offset)):
        memory, offset = memory[came:], offset + came
    memory[:] = bytes(memory.nbytes)


def _announce(descriptor: int, start: int, end: int) -> None:
    """Tell the system that a range will be read. What it has in memory already costs little to be named again."""
    if sys.platform == "linux":
        for offset in range(start, end, _ANNOUNCED_BYTES):
            os.posix_fadvise(descriptor, offset, min(_ANNOUNCED_BYTES, end - offset), os.POSIX_FADV_WILLNEED)
