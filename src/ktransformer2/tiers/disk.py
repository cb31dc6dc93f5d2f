"""The disk tier: blocks that outlive the process, in segment files of one directory, for one lineage at a time.

Several processes may share the directory. One of them changes it at a time; reading takes no lock. A reader believes
no index, only a record's header and checksum: what is not the block that was asked for, byte for byte, is a miss, is
counted, and is removed.

Nothing is flushed to the platters: after a power cut a record that did not arrive does not verify.

    off        the directory cannot be used (read-only, another's, a link): `off_reason` says why, all is a miss
    full       the disk has no room: nothing is written until there is some, reading goes on
    gone       the directory was deleted: a miss; the next write makes it anew

Knows no prompt and no device. Raises ConfigError on a network's file system, when it is opened; nothing later.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from ktransformer2.tiers.disk_failures import FAILURES, kind_of, said
from ktransformer2.tiers.disk_index import DiskIndex, IndexedBlock, says_broken
from ktransformer2.tiers.disk_listing import HeldBlock, indexed
from ktransformer2.tiers.disk_store import DiskLimits, DiskStore
from ktransformer2.tiers.disk_uses import PendingUses
from ktransformer2.tiers.header import BlockHeader
from ktransformer2.tiers.segment_reader import Record
from ktransformer2.tiers.shared_filter import SharedFilter
from ktransformer2.tiers.tally import LOG, Tally
from ktransformer2.tiers.tier import ROOT, Clock, Lineage, StoredBlock, TierStats

NO_LINEAGE = Lineage(b"", (), ())  # for who looks at a directory, and reads no block
_Result = TypeVar("_Result")
_EXPIRY_SHARE = 20  # what outlived its time is looked for each twentieth of it


class DiskTier:
    """Blocks of one lineage in a directory of at most `limits.limit_bytes`. See `Tier` for what the calls promise."""

    name = "disk"
    lasts = True

    def __init__(
        self, directory: Path, limits: DiskLimits, lineage: Lineage = NO_LINEAGE, clock: Clock = time.time
    ) -> None:
        """Raises: ConfigError on a network's file system. A directory that cannot be used is a tier that is off.

        `clock`: seconds since 1970. It may jump: order is kept without it.
        """
        self.directory, self.limits, self.lineage = directory, limits, lineage
        self.off_reason: str | None = None
        self._clock, self._tally = clock, Tally(self.name)
        self._filter = SharedFilter()
        self._scanning = threading.Lock()
        self._empty_filter()  # what nobody looked at yet is not there
        self._uses = PendingUses()
        self._has_said_where = False
        self._next_expiry_s = 0.0
        self._store: DiskStore | None = None
        try:
            self._store = DiskStore(directory, limits, clock, self._tally)
            with self._store.changing():
                self._store.expire()
                self._store.make_room(0)
            self.refresh()
        except (OSError, sqlite3.Error) as error:
            self._tally.failed(kind_of(error, "open"), f"{directory}: {said(error)}")
            if self._store is None or kind_of(error, "open") == "read_only":
                self.close()
                self.off_reason = f"the disk tier is off, {directory} cannot be used: {said(error)}"

    # What every tier does

    def may_hold(self, key: bytes) -> bool:
        held = self._filter.may_hold(key)
        self._tally.count(lookups=1, filter_saved=not held)
        return held

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        return self._attempt("write", 0, lambda store: self._put(store, blocks))

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        return self._attempt("read", [], lambda store: self._get(store, keys))

    def clear(self) -> int:
        def clear(store: DiskStore) -> int:
            with store.changing():
                before = store.disk_bytes_now()
                store.clear()
                self._empty_filter()
                return max(0, before - store.disk_bytes_now())

        return self._attempt("delete", 0, clear)

    def stats(self) -> TierStats:
        """`held_blocks` and `held_bytes` are the directory's, of all lineages, as of the last change made here."""
        store = self._store
        held = (store.num_blocks, store.disk_bytes) if store else (0, 0)
        return self._tally.stats(*held, self.limits.limit_bytes)

    def close(self) -> None:
        self._attempt("write", None, self._tell_at_close)
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # What only a directory can

    def refresh(self) -> None:
        """Tell the filter what others wrote, where it was told longer ago than `filter_refresh_s`, or is worn."""
        self._attempt("read", None, self._refresh)

    def entries(self) -> list[HeldBlock]:
        """All that lies there, of every lineage, the newest use first."""
        return self._attempt("read", [], lambda store: indexed(store.index, self._clock()))

    def gc(self) -> int:
        """Remove files of older formats, what outlived its time in any lineage, and holes; bytes freed."""

        def collect(store: DiskStore) -> int:
            with store.changing():
                before = store.disk_bytes_now()
                self._tell_uses(store.index)
                store.discard_older()
                store.expire()
                store.tidy()
                store.index.checkpoint()
                return max(0, before - store.disk_bytes_now())

        return self._attempt("delete", 0, collect)

    # Inside

    def _put(self, store: DiskStore, blocks: Sequence[StoredBlock]) -> int:
        with store.changing():
            self._tell_uses(store.index)
            if time.monotonic() >= self._next_expiry_s:
                self._next_expiry_s = time.monotonic() + self.limits.ttl_s / _EXPIRY_SHARE
                store.expire()
            index, now_s = store.index, self._clock()
            named = dict.fromkeys(key for block in blocks for key in (block.parent, block.key) if key != ROOT)
            rows = index.find(self._lineages(index), named)
            self._uses.note([key for key in named if key in rows], now_s)
            self._tell_uses(index)
            new = _placeable(blocks, rows.keys())
            records = [(BlockHeader.describe(block, self.lineage, now_s), block.payload) for block in new]
            held = {block.key for block in blocks if block.key in rows}
            num_there = len(held)
            try:
                for written in store.add(records, {row.block for row in rows.values()}):
                    num_bytes = sum(header.payload_bytes for header in written)
                    self._tally.transfer(num_bytes)
                    self._tally.count(stored_blocks=len(written), stored_bytes=num_bytes)
                    held.update(header.key for header in written)
            finally:
                self._filter.add(held)
        if len(held) > num_there and not self._has_said_where:
            self._has_said_where = True
            LOG.info(
                "blocks are kept in %s: %d of at most %d bytes",
                *(self.directory, store.disk_bytes, self.limits.limit_bytes),
            )
        self._refresh(store)
        return len(held)

    def _tell_uses(self, index: DiskIndex) -> None:
        """Tell the index what was read and written since the last time. Inside `changing`."""
        if uses := self._uses.take():
            rows = index.find(self._lineages(index), uses)
            index.touch([(rows[key].block, second) for key, second in uses.items() if key in rows])

    def _tell_at_close(self, store: DiskStore) -> None:
        if self._uses and store.is_open:
            with store.changing():
                self._tell_uses(store.index)

    def _get(self, store: DiskStore, keys: Sequence[bytes]) -> list[memoryview]:
        index = store.index
        rows = self._leading(index, keys)
        payloads, damaged = self._read(store, rows)
        if len(payloads) < len(rows):  # a record that was moved meanwhile lies elsewhere now; a damaged one does not
            again = index.find(self._lineages(index), [row.key for row in rows if row.key not in payloads])
            moved = [again[row.key] for row in rows if row.key in again and again[row.key].place != row.place]
            more, more_damaged = self._read(store, moved)
            payloads |= more
            broken = [row for row in damaged + more_damaged if again.get(row.key, row).place == row.place]
            self._attempt("delete", None, lambda store: self._drop(store, broken))
        found = [payloads[key] for key in _leading_in(keys, payloads)]
        if len(found) < len(keys) and self._filter.passes(keys[len(found)]):
            self._tally.count(filter_false=1)
        if found:
            self._tally.count(loaded_blocks=len(found), loaded_bytes=sum(map(len, found)))
            self._filter.add(keys[: len(found)])
            self._uses.note(keys[: len(found)], self._clock())
        self._refresh(store)
        return found

    def _empty_filter(self) -> None:
        """Nothing is there, until somebody writes or looks."""
        with self._scanning:
            self._filter.begin_scan()
            self._filter.end_scan(())
            self._next_refresh_s = 0.0  # by the monotonic clock

    def _refresh(self, store: DiskStore) -> None:
        now = time.monotonic()
        if (now < self._next_refresh_s and not self._filter.is_worn) or not self._scanning.acquire(blocking=False):
            return  # not due, or another thread is at it
        keys: list[bytes] | None = None
        self._filter.begin_scan()
        try:
            keys = store.index.keys(self._lineages(store.index))
        finally:
            self._tally.count(filter_missed=self._filter.end_scan(keys))
            self._scanning.release()
        self._next_refresh_s = now + self.limits.filter_refresh_s

    def _leading(self, index: DiskIndex, keys: Sequence[bytes]) -> list[IndexedBlock]:
        """The rows of the leading keys that are there and in time. A use of a block is a use of what it continues."""
        found = index.find(self._lineages(index), keys)
        rows = [found[key] for key in _leading_in(keys, found)]
        if self.limits.ttl_s:
            oldest_s = self._clock() - self.limits.ttl_s
            while rows and self._uses.last_s(rows[-1].key, rows[-1].used_s) < oldest_s:
                rows.pop()
        return rows

    def _read(
        self, store: DiskStore, rows: Sequence[IndexedBlock]
    ) -> tuple[dict[bytes, memoryview], list[IndexedBlock]]:
        """The payloads of rows that are what they should be; and the rows of records that are not."""
        asked = {row.place: row for row in rows}
        whole: dict[bytes, memoryview] = {}
        damaged = []
        for piece in store.read(asked, partial(self._note, "read")):
            self._tally.transfer(sum(place.payload_bytes for place, _ in piece))
            for place, record in piece:  # each while it is in the processor's cache
                row = asked[place]
                if self._is_whole(row, record):
                    whole[row.key] = record.payload
                else:
                    damaged.append(row)
        return whole, damaged

    def _is_whole(self, row: IndexedBlock, record: Record) -> bool:
        header = record.header
        return header is not None and header.is_of(self.lineage, row.key) and header.vouches_for(record.payload)

    def _drop(self, store: DiskStore, damaged: Sequence[IndexedBlock]) -> None:
        """Count damaged records, and remove them with what cannot be without them."""
        if damaged:
            self._tally.failed("checksum", "records are damaged, or not what they should be", len(damaged))
            with store.changing():
                now = store.index.find(self._lineages(store.index), [row.key for row in damaged])
                places = {row.place for row in damaged}
                store.remove_all([row for row in now.values() if row.place in places])

    def _lineages(self, index: DiskIndex) -> set[int]:
        """The numbers that this lineage has in the index, one for each of its layouts."""
        numbers, lineage = index.lineages(), self.lineage
        wanted = [(lineage.fingerprint, layout) for layout in lineage.layouts]
        return {numbers[one] for one in wanted if one in numbers}

    def _attempt(self, what: str, otherwise: _Result, act: Callable[[DiskStore], _Result]) -> _Result:
        """Do something with the directory; what fails is counted, and is `otherwise`. A broken index is mended."""
        store = self._store
        if store is None:
            return otherwise
        try:
            return act(store)
        except FAILURES as error:
            self._note(what, error)
            if isinstance(error, sqlite3.Error) and says_broken(error):
                self._mend(store)
            if not store.is_open:  # gone, and all that lay there with it: it may be written again
                self._empty_filter()
            return otherwise

    def _mend(self, store: DiskStore) -> None:
        try:
            store.rebuild_index()
        except FAILURES as error:
            self._note("index", error)

    def _note(self, what: str, error: Exception) -> None:
        self._tally.failed(kind_of(error, what), f"{self.directory}: {said(error)}")


def _leading_in(keys: Iterable[bytes], there: Container[bytes]) -> list[bytes]:
    return list(takewhile(lambda key: key in there, keys))


def _placeable(blocks: Iterable[StoredBlock], there: Container[bytes]) -> list[StoredBlock]:
    """The blocks that are not there, each once, whose parents are there or come before them."""
    new: dict[bytes, StoredBlock] = {}
    for block in blocks:
        rooted = block.parent == ROOT or not block.holds_parent or block.parent in there or block.parent in new
        if rooted and block.key not in there:
            new.setdefault(block.key, block)
    return list(new.values())
