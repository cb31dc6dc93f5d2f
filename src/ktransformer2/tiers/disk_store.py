"""What happens in the disk tier's directory: records are added, removed and brought together, within its limit.

Everything that changes the directory runs inside `changing`, which holds the directory's lock and begins by squaring
the index with the files: what a killed process left behind, what was deleted, cut, swapped or lost is found out there,
each time, by comparing sizes. So no other file needs to be trusted, and none needs a repair of its own.

Room is made in this order: SQLite's log is cut, files of older formats go, dead bytes are given back by compaction,
then the blocks whose last use is longest ago and that hold up no other.

Knows no policy for failures and no prompt; raises OSError and sqlite3.Error. `find` and `read` take no lock.

Invariants: disk bytes of the directory <= limit after every change; a parent is held as long as what needs it; a
range without a row reads as zeros, or lies in a file that is about to go.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ktransformer2.tiers import disk_compaction, disk_removal, segment_reader, segments
from ktransformer2.tiers.disk_append import Appender
from ktransformer2.tiers.disk_directory import Survey, index_name, locked, prepare, segment_name, survey
from ktransformer2.tiers.disk_failures import kind_of
from ktransformer2.tiers.disk_index import DiskIndex, IndexedBlock, says_broken
from ktransformer2.tiers.disk_pins import read_pins, write_pins
from ktransformer2.tiers.header import BlockHeader, Bytes
from ktransformer2.tiers.read_memory import ReadMemory
from ktransformer2.tiers.segment_reader import Record
from ktransformer2.tiers.segments import MAX_RECORDS_PER_CALL, Place
from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.tier import Clock

# What a change may add to the index and its log: pages of three trees for each row, and those of the trees' tops.
_INDEX_BYTES_PER_ROW = 4 * segments.PAGE_BYTES
_INDEX_BYTES = 16 * segments.PAGE_BYTES
_SLACK_SHARE = 32  # an eviction goes on until 1/32 of the limit is free, so that the next put needs none
_SCANNED_AT_ONCE = 1000


@dataclass(frozen=True)
class DiskLimits:
    """Bounds of a directory. `ttl_s` 0: what is not used stays until there is no room.

    `lock_wait_s`: how long a change waits for another process. `filter_refresh_s`: how old what others wrote may be
    before the filter is told of it.
    """

    limit_bytes: int
    segment_bytes: int = 256 * 2**20
    ttl_s: float = 0.0
    lock_wait_s: float = 10.0
    filter_refresh_s: float = 60.0


class DiskStore:
    """The records of one directory. One thread of this process at a time changes it; any may `find` and `read`."""

    def __init__(self, directory: Path, limits: DiskLimits, clock: Clock, tally: Tally) -> None:
        """Makes the directory. Raises: ConfigError on a network's file system; OSError where it cannot be used."""
        prepare(directory)
        self.directory, self.limits, self.clock, self._tally = directory, limits, clock, tally
        self.num_blocks = self.disk_bytes = 0  # as of the last change made here
        self._index: DiskIndex | None = None
        self._appender = Appender(directory, limits.segment_bytes)
        self._changing = threading.RLock()
        self._memory = ReadMemory()

    @property
    def is_open(self) -> bool:
        """Whether there is an index to ask."""
        return self._index is not None and self._index.is_there

    @property
    def index(self) -> DiskIndex:
        """The open index. Raises: FileNotFoundError while there is none; the next change makes one."""
        if self._index is None or not self._index.is_there:
            raise FileNotFoundError(2, "the index is gone", self.directory)
        return self._index

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the directory's lock, with index and files squared. Raises: TimeoutError; OSError; sqlite3.Error."""
        with self._changing:
            if not self.directory.is_dir():
                prepare(self.directory)  # it was deleted since
            with locked(self.directory, self.limits.lock_wait_s):
                try:
                    self._square()
                    yield
                    self.make_room(0)
                    self._measure()
                except sqlite3.Error as error:
                    if says_broken(error):
                        self._forget_index()
                    raise

    def close(self) -> None:
        """Let go of all files. A second call does nothing."""
        with self._changing:
            self._appender.release()
            if self._index is not None:
                self._index.close()
                self._index = None

    # Reading

    def read(
        self, places: Collection[Place], failed: Callable[[OSError], None]
    ) -> Iterator[list[tuple[Place, Record]]]:
        """The records at those places that can be read, those of each call together, as soon as they came."""
        return segment_reader.read(self.directory, places, self._memory, failed)

    # Squaring

    def _square(self) -> None:
        """Make index and files agree."""
        found = survey(self.directory)
        if self._index is None or found.indexes != [self._index.path.name]:
            self._open_index(found)
        index = self.index
        known = index.segments()
        if known == {segment: file.num_bytes for segment, file in found.segments.items()}:
            return
        with index.transaction():
            for segment in known.keys() - found.segments.keys():
                index.remove(row.block for row in index.lying_in(segment))
                index.drop_segment(segment)
            for segment, file in sorted(found.segments.items()):
                end = known.get(segment, 0)
                if file.num_bytes < end:
                    index.remove(row.block for row in index.lying_in(segment) if row.place.end > file.num_bytes)
                elif file.num_bytes > end:
                    self._read_in(segment, end)
                index.set_end(segment, file.num_bytes)
            while orphans := index.orphans():
                disk_removal.remove(self.directory, index, orphans)
            disk_removal.discard_empty(self.directory, index)

    def _read_in(self, segment: int, start: int) -> None:
        """Give rows to the records behind `start`. Of a key that has one already, the second record is wiped."""
        index, now_s = self.index, self.clock()
        found = segments.scan(self.directory, segment, start)
        while piece := list(islice(found, _SCANNED_AT_ONCE)):
            fresh: dict[tuple[int, bytes], tuple[Place, BlockHeader]] = {}
            lineages = {(h.fingerprint, h.layout): index.lineage_of(h) for _, h in piece}
            for lineage in lineages.values():
                ours = [(p, h) for p, h in piece if lineages[h.fingerprint, h.layout] == lineage]
                held = index.find([lineage], [h.key for _, h in ours])
                for place, header in ours:
                    if header.key in held or (lineage, header.key) in fresh:
                        segments.wipe(self.directory, segment, place.offset, place.num_bytes)
                    else:
                        fresh[lineage, header.key] = place, header
            places, headers = [p for p, _ in fresh.values()], [h for _, h in fresh.values()]
            index.add(headers, places, [min(now_s, h.written_s) for h in headers])

    def _open_index(self, found: Survey) -> None:
        """Open the one index that lies there; where there is none, several, or a broken one, begin anew."""
        if self._index is not None:
            self._index.close()
            self._index = None
        if len(found.indexes) == 1:
            try:
                self._index = DiskIndex.open(self.directory / found.indexes[0])
            except sqlite3.Error as error:
                if not says_broken(error):
                    raise
        if self._index is None:
            for name in found.index_files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.directory / name)
            # A name of its own: whoever still has the old one open removes the old one's log when it closes.
            self._index = DiskIndex.open(self.directory / index_name(secrets.token_hex(4)))
        self._index.set_back(self.clock())

    def _forget_index(self) -> None:
        """The next change builds it anew."""
        if self._index is not None:
            self._index.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._index.path)
            self._index = None

    def rebuild_index(self) -> None:
        """Begin the index anew from the segments. Raises: as `changing`."""
        with self._changing, locked(self.directory, self.limits.lock_wait_s):
            self._forget_index()
            self._square()

    def disk_bytes_now(self) -> int:
        """What the directory takes now."""
        return survey(self.directory).disk_bytes

    def _measure(self) -> None:
        self.disk_bytes, self.num_blocks = self.disk_bytes_now(), self.index.num_blocks

    # Adding; inside `changing`

    def add(
        self, records: Sequence[tuple[BlockHeader, Bytes]], kept: Collection[int]
    ) -> Iterator[Sequence[BlockHeader]]:
        """Write records that have no row yet, parents first, as far as there is room; the headers of each call.

        `kept`: rows that must not go to make room, the parents among them. Raises: OSError, also before anything is
        written to a disk that has no room; sqlite3.Error. Then rows and records still agree.
        """
        if not records:
            return
        needs = [segments.record_bytes(header.payload_bytes) + _INDEX_BYTES_PER_ROW for header, _ in records]
        room = self.make_room(sum(needs) + _INDEX_BYTES, kept) - _INDEX_BYTES
        fits = 0
        while fits < len(needs) and needs[fits] <= room:
            room -= needs[fits]
            fits += 1
        if not self.index.has(kept):
            return  # a parent was found damaged while room was made
        self._require_free(sum(needs[:fits]) + _INDEX_BYTES)
        for start in range(0, fits, MAX_RECORDS_PER_CALL):
            piece = records[start : min(start + MAX_RECORDS_PER_CALL, fits)]
            self._appender.add(self.index, piece, self.clock())
            yield [header for header, _ in piece]

    def _require_free(self, need: int) -> None:
        """Raises: OSError before anything is written to a disk that has no room for it."""
        for attempt in range(2):
            free = os.statvfs(self.directory)
            if free.f_bavail * free.f_frsize >= need:
                return
            if not attempt:
                self.index.checkpoint()
        raise OSError(errno.ENOSPC, "the disk is full", self.directory)

    # Making room; inside `changing`

    def room(self) -> int:
        """Bytes that the limit leaves; below 0 where it was lowered."""
        return self.limits.limit_bytes - self.disk_bytes_now()

    def make_room(self, need: int, kept: Collection[int] = ()) -> int:
        """Let go until `need` bytes fit, or nothing is left that may go; the bytes that fit now.

        Nothing that is pinned goes for what is new; it goes where without it a limit that was lowered is passed.
        """
        if self.room() >= need:
            return self.room()
        self.index.checkpoint()
        self.discard_older()
        if self.room() >= need:
            return self.room()
        pinned = self._pinned()
        wanted = min(need + self.limits.limit_bytes // _SLACK_SHARE, self.limits.limit_bytes)
        while (room := self.room()) < wanted:
            if self._give_back_dead(room) or self._evict(wanted - room, {*kept, *pinned}):
                continue
            if room >= 0 or not pinned:
                break
            pinned = set()
        return room

    def _pinned(self) -> set[int]:
        """The rows that are pinned themselves; what they continue is held up by them."""
        index, pins = self.index, read_pins(self.directory)
        numbers = index.lineages() if pins else {}
        known = [(numbers.get((pin.fingerprint, pin.layout)), pin.key) for pin in pins]
        return {row.block for number, key in known if number for row in index.find([number], [key]).values()}

    def _give_back_dead(self, room: int) -> bool:
        files = survey(self.directory).segments
        return disk_compaction.give_back_dead(self.directory, self.index, files, room, self._appender)

    def _evict(self, wanted: int, kept: Collection[int]) -> int:
        victims = disk_removal.evict(self.directory, self.index, wanted, kept)
        self._tally.count(evicted_blocks=victims)
        return victims

    def tidy(self) -> None:
        """Bring together what lies scattered in files that are mostly holes."""
        files, room = survey(self.directory).segments, self.room() - _INDEX_BYTES
        disk_compaction.tidy(self.directory, self.index, files, room, self._appender)

    # Removing; inside `changing`

    def remove_all(self, rows: Sequence[IndexedBlock]) -> None:
        """Remove blocks, and what cannot be without them.

        A disk that is too full for the index to forget the rows keeps them; their bytes are gone all the same.
        """
        gone = disk_removal.with_continuations(self.index, rows)
        try:
            if gone:
                disk_removal.remove(self.directory, self.index, gone)
        except sqlite3.Error as error:
            if kind_of(error, "") != "full":
                raise
            self._tally.failed("full", f"{self.directory}: the index could not be told what was removed")

    def expire(self) -> int:
        """Remove what nobody used for the time to live, of any lineage; how many. Uses in the future happened now."""
        if not self.limits.ttl_s:
            return 0
        now_s = self.clock()
        self.index.set_back(now_s)
        return disk_removal.expire(self.directory, self.index, now_s - self.limits.ttl_s)

    def discard_older(self) -> None:
        """Delete the files of formats before this one."""
        for name in survey(self.directory).older:
            segments.discard(self.directory / name)

    def clear(self) -> None:
        """Delete every record of every lineage, and all pins."""
        self._appender.release()
        self.discard_older()
        write_pins(self.directory, ())
        index = self.index
        with index.transaction():
            for segment in survey(self.directory).segments:
                segments.discard(self.directory / segment_name(segment))
                index.drop_segment(segment)
            index.remove([row.block for row in index.rows()])
        index.shrink()
