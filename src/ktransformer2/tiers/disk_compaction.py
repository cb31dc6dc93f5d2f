"""What is alive in a segment is copied behind the end of another, and the segment is deleted.

Worth it for two reasons. Where the file system leaves no holes, it is the only way to get back the room of records
that were removed. And where it does, a file that is mostly holes holds its chains scattered.

Knows no limit and no lock of the directory: called by whoever holds it. Raises: OSError, sqlite3.Error; then every row
still names a record, the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktransformer2.tiers import disk_removal, segment_reader
from ktransformer2.tiers.disk_append import Appender
from ktransformer2.tiers.disk_directory import SegmentFile
from ktransformer2.tiers.disk_index import DiskIndex, IndexedBlock
from ktransformer2.tiers.header import BlockHeader, Bytes
from ktransformer2.tiers.read_memory import ReadMemory
from ktransformer2.tiers.segments import SegmentWriter

_DEAD_SHARE = 4  # dead bytes of 1/4 of what a segment takes are worth copying the rest, when room is short
_LIVE_SHARE = 4  # a segment of which less than 1/4 is alive is worth copying when nothing is short
_RECORDS_AT_ONCE = 32


def give_back_dead(
    directory: Path, index: DiskIndex, files: dict[int, SegmentFile], room: int, appender: Appender
) -> bool:
    """Compact the segment with the most dead bytes, its copy no larger than `room`. False: none is worth it."""
    live = index.live_bytes()
    dead = {s: file.disk_bytes - live.get(s, 0) for s, file in files.items()}
    for segment in sorted(dead, key=lambda s: dead[s], reverse=True):
        if dead[segment] * _DEAD_SHARE < files[segment].disk_bytes:
            return False
        if live.get(segment, 0) <= room and compact(directory, index, segment, appender):
            return True
    return False


def tidy(directory: Path, index: DiskIndex, files: dict[int, SegmentFile], room: int, appender: Appender) -> None:
    """Compact all segments of which little is alive, as far as their copies fit into `room`."""
    live = index.live_bytes()
    for segment, file in sorted(files.items()):
        alive = live.get(segment, 0)
        if alive * _LIVE_SHARE < file.num_bytes and alive <= room:
            compact(directory, index, segment, appender)


def compact(directory: Path, index: DiskIndex, segment: int, appender: Appender) -> bool:
    """Empty one segment into others. False: a process adds to it, this one or another."""
    end = index.segments().get(segment)
    if segment == appender.segment or end is None:
        return False
    held = SegmentWriter.adopt(directory, segment, end)
    if held is None:
        return False
    try:
        while rows := index.lying_in(segment)[:_RECORDS_AT_ONCE]:
            _copy(directory, index, rows, appender)
        with index.transaction():
            disk_removal.discard_empty(directory, index)
    finally:
        held.close()
    return True


def _copy(directory: Path, index: DiskIndex, rows: Sequence[IndexedBlock], appender: Appender) -> None:
    """Move records; damaged ones go, and what cannot be without them."""
    failures: list[OSError] = []
    pieces = segment_reader.read(directory, [row.place for row in rows], ReadMemory(), failures.append)
    records = {place: record for piece in pieces for place, record in piece}
    if failures:
        raise failures[0]
    whole: list[tuple[IndexedBlock, BlockHeader, Bytes]] = []
    damaged = []
    for row in rows:
        record = records[row.place]
        if record.header is None or record.header.key != row.key or not record.header.vouches_for(record.payload):
            damaged.append(row)
        else:
            whole.append((row, record.header, record.payload))
    gone = disk_removal.with_continuations(index, damaged)
    if gone:
        disk_removal.remove(directory, index, gone)
    if whole := [one for one in whole if one[0] not in gone]:
        appender.move(index, whole)
