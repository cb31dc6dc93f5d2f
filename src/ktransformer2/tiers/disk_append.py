"""Records come into a directory: into the one segment that this process holds, and from it into the index.

Records first, then their rows. What stops in between leaves records without rows at the end of a file, which are found
by the file's length. Nothing waits for the disk: a record says by itself whether it is whole.

Knows no limit and no lock of the directory: called by whoever holds it. Raises: OSError, sqlite3.Error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktransformer2.tiers.disk_index import DiskIndex, IndexedBlock
from ktransformer2.tiers.header import BlockHeader, Bytes
from ktransformer2.tiers.segments import SegmentWriter


class Appender:
    """The segment that this process adds to, held by a lock on the file. Others go on with it once it is let go."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self._directory, self._segment_bytes = directory, segment_bytes
        self._writer: SegmentWriter | None = None

    @property
    def segment(self) -> int | None:
        """The number of the segment that it holds, if any."""
        return self._writer.segment if self._writer is not None else None

    def add(self, index: DiskIndex, records: Sequence[tuple[BlockHeader, Bytes]], now_s: float) -> None:
        """Write records, in the order of their chains, and give them rows. In one call, in one transaction."""
        writer = self._writable(index)
        with writer.undone_on_failure():
            places = writer.append(records)  # no transaction is open meanwhile: readers do not wait for the disk
            with index.transaction():
                index.add([header for header, _ in records], places, [now_s] * len(records))
                index.set_end(writer.segment, writer.end)

    def move(self, index: DiskIndex, records: Sequence[tuple[IndexedBlock, BlockHeader, Bytes]]) -> None:
        """Write records again, and let their rows say so. The old records stay where they are."""
        writer = self._writable(index)
        with writer.undone_on_failure():
            places = writer.append([(header, payload) for _, header, payload in records])
            with index.transaction():
                for (row, _, _), place in zip(records, places, strict=True):
                    index.move(row.block, place)
                index.set_end(writer.segment, writer.end)

    def release(self) -> None:
        """Let go of the segment. A second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _writable(self, index: DiskIndex) -> SegmentWriter:
        """The segment of this process; else one that nobody holds and that is not full; else a new one."""
        if self._writer is not None and self._writer.is_there and self._writer.end < self._segment_bytes:
            return self._writer
        self.release()
        ends = index.segments()
        self._writer = self._adopted(index, ends) or SegmentWriter.create(self._directory, max(ends, default=0) + 1)
        with index.transaction():
            index.set_end(self._writer.segment, self._writer.end)
        return self._writer

    def _adopted(self, index: DiskIndex, ends: dict[int, int]) -> SegmentWriter | None:
        for segment in sorted((s for s, end in ends.items() if end < self._segment_bytes), reverse=True):
            end = max((row.place.end for row in index.lying_in(segment)), default=0)
            if writer := SegmentWriter.adopt(self._directory, segment, end):
                return writer
        return None
