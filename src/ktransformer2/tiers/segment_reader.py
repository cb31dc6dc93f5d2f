"""Records come out of segments, as fast as the files can be read from beginning to end.

    read ahead  by the system, so that the disk works while what came is looked at
    read        neighbours in one call, a piece at a time: the receiver finds it in the processor's cache
    placed      header and payload together, into memory that was used before: no copy, and no page fault

Knows no index and no key; says nothing of whether a record is what it should be. Every call opens its files anew, as
all that touch segments do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ktransformer2.tiers.header import BlockHeader
from ktransformer2.tiers.read_memory import ReadMemory
from ktransformer2.tiers.segments import PAGE_BYTES, Place, adjacent, opened

PIECE_BYTES = 2 * 2**20


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
    try:
        left = memory.take(sum(place.num_bytes for place in places))
    except OSError as error:
        failed(error)
        return
    for segment, pieces in groupby(adjacent(places, PIECE_BYTES), key=lambda piece: piece[0].segment):
        try:
            with opened(directory, segment, os.O_RDONLY) as descriptor:
                _read_ahead(descriptor)
                for piece in pieces:
                    first, end = piece[0].offset, piece[-1].end
                    here, left = left[: end - first], left[end - first :]
                    if _is_filled(descriptor, here, first, failed):
                        yield [(place, _record(here, place, first)) for place in piece]
        except OSError as error:
            failed(error)


def _record(memory: memoryview, place: Place, first: int) -> Record:
    start = place.offset - first + PAGE_BYTES
    header = BlockHeader.unpack(memory[start - PAGE_BYTES : start])
    return Record(header, memory[start : start + place.payload_bytes])


def _is_filled(descriptor: int, memory: memoryview, offset: int, failed: Callable[[OSError], None]) -> bool:
    """Read until the memory is full or the file ends; zeros behind that. False: `failed` was told why not."""
    try:
        while memory.nbytes and (came := os.preadv(descriptor, [memory], offset)):
            memory, offset = memory[came:], offset + came
    except OSError as error:
        failed(error)
        return False
    memory[:] = bytes(memory.nbytes)
    return True


def _read_ahead(descriptor: int) -> None:
    """Have the system fetch what follows each read while that is looked at.

    In its own way: to name ranges (POSIX_FADV_WILLNEED) took more of the processor's time than the reading, and saved
    none.
    """
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
