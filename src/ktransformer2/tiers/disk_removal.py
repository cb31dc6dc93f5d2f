"""Records leave a directory: their bytes first, then their rows, then files that are empty.

In this order, because what stops in between leaves rows whose records read as zeros: a reader does not believe them,
and they are removed again. The other way round bytes would stay that nobody knows of.

Knows no limit and no lock: called by whoever holds the directory's lock. Raises: OSError, sqlite3.Error; then no row
is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ktransformer2.tiers import segments
from ktransformer2.tiers.disk_directory import segment_name
from ktransformer2.tiers.disk_index import DiskIndex, IndexedBlock
from ktransformer2.tiers.segments import adjacent


def remove(directory: Path, index: DiskIndex, rows: Sequence[IndexedBlock]) -> None:
    """Wipe the records of rows, and forget the rows."""
    _wipe(directory, rows)
    with index.transaction():
        index.remove(row.block for row in rows)
        discard_empty(directory, index)


def with_continuations(index: DiskIndex, rows: Sequence[IndexedBlock]) -> list[IndexedBlock]:
    """Rows and what cannot be without them, each once."""
    found = {row.block: row for top in rows for row in index.continuations(top.block)}
    return list(found.values())


def evict(directory: Path, index: DiskIndex, wanted_bytes: int, kept: Collection[int]) -> int:
    """Remove the blocks used longest ago that hold up no other, until their records have `wanted_bytes`; how many."""
    victims: list[IndexedBlock] = []
    freed = 0
    with index.transaction():
        while freed < wanted_bytes and (row := index.oldest_free(kept)) is not None:
            index.remove([row.block])
            victims.append(row)
            freed += row.place.num_bytes
        _wipe(directory, victims)
        discard_empty(directory, index)
    return len(victims)


def expire(directory: Path, index: DiskIndex, before_s: float) -> int:
    """Remove what was last used before that time, leaves first, so that a parent in use by its children stays."""
    count = 0
    while rows := index.expired(before_s):
        remove(directory, index, rows)
        count += len(rows)
    return count


def discard_empty(directory: Path, index: DiskIndex) -> None:
    """Delete the segments that no row names. A process that was adding to one begins another."""
    for segment in index.empty_segments():
        segments.discard(directory / segment_name(segment))
        index.drop_segment(segment)


def _wipe(directory: Path, rows: Sequence[IndexedBlock]) -> None:
    for run in adjacent(row.place for row in rows):
        try:
            segments.wipe(directory, run[0].segment, run[0].offset, run[-1].end - run[0].offset)
        except FileNotFoundError:
            continue  # deleted by someone else: its bytes are gone
