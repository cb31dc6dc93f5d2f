"""Where each record of a directory lies, who holds whom, and the order of use: SQLite, in WAL mode.

It knows nothing that the segments do not say again, but the order of use: lost, it is built anew from them. So
nothing here waits for the disk (`synchronous=NORMAL`), and what it says is only where to look: a reader believes the
record's header.

Order is a counter, never a clock: `used` rises with every use, and within one chain the tail is used before its head,
so the oldest row that nothing holds is found at once. `used_s` is the wall clock's, for the time to live only.

Invariants: a row names one range of one segment, ranges do not overlap; `segments.end` is how far a file has been read
into this index. Any thread: one connection behind one lock. Raises: sqlite3.Error.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ktransformer2.tiers.header import FORMAT_VERSION, BlockHeader
from ktransformer2.tiers.segments import Place
from ktransformer2.tiers.tier import ROOT

_SCHEMA = """
CREATE TABLE lineages(
    lineage INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, layout BLOB NOT NULL, UNIQUE(fingerprint, layout));
CREATE TABLE blocks(
    block INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL,
    holds_parent INTEGER NOT NULL, num_tokens INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL, used INTEGER NOT NULL, used_s REAL NOT NULL,
    UNIQUE(lineage, key), UNIQUE(segment, offset));
CREATE INDEX by_parent ON blocks(lineage, parent);
CREATE INDEX by_use ON blocks(used);
CREATE TABLE segments(segment INTEGER PRIMARY KEY, end INTEGER NOT NULL);
"""
_SETTINGS = "PRAGMA synchronous=NORMAL", "PRAGMA wal_autocheckpoint=64", "PRAGMA journal_size_limit=262144"
_COLUMNS = "block, lineage, key, parent, holds_parent, num_tokens, segment, offset, payload_bytes, used_s"
_HELD = "EXISTS(SELECT 1 FROM blocks c WHERE c.lineage = b.lineage AND c.parent = b.key AND c.holds_parent)"
_KEYS_AT_ONCE = 500  # a statement takes at least 999 values
_BUSY_WAIT_S = 5.0
_BROKEN = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT))


@dataclass(frozen=True)
class IndexedBlock:
    """One row. `block` names it for as long as the index lives."""

    block: int
    lineage: int
    key: bytes
    parent: bytes
    holds_parent: bool
    num_tokens: int
    place: Place
    used_s: float


def says_broken(error: sqlite3.Error) -> bool:
    """Whether an error means that the index is no use any more: damaged, foreign, or contradicting itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BROKEN


class DiskIndex:
    """One open index file. Writes happen inside `transaction`; the directory's lock is the caller's matter."""

    def __init__(self, path: Path, mode: str, *statements: str) -> None:
        """`mode`: how SQLite opens the file, as in its URIs; then `statements` are executed.

        Raises: sqlite3.Error, also for an index that is damaged or of another format.
        """
        self.path = path
        self._lock = threading.RLock()
        uri = f"{path.absolute().as_uri()}?{mode}"
        self._sql = sqlite3.connect(uri, timeout=_BUSY_WAIT_S, isolation_level=None, check_same_thread=False, uri=True)
        try:
            for statement in statements:
                self._sql.executescript(statement)
            self._check()
        except sqlite3.Error:
            self._sql.close()
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """What is there, or a new one. Raises: sqlite3.Error; OSError."""
        new: tuple[str, ...] = ()
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            new = "PRAGMA journal_mode=WAL", f"BEGIN; {_SCHEMA} PRAGMA user_version={FORMAT_VERSION}; COMMIT;"
        return cls(path, "mode=rw", *new, *_SETTINGS)

    @classmethod
    def look(cls, path: Path) -> Self:
        """What is there, to be read only: beside who writes to it, and where nobody does. Raises: sqlite3.Error."""
        is_open = path.with_name(f"{path.name}-wal").exists()  # without a log nobody has it open: it is a file like any
        return cls(path, "mode=ro" if is_open else "immutable=1")

    def _check(self) -> None:
        version = self._sql.execute("PRAGMA user_version").fetchone()[0]
        verdict = self._sql.execute("PRAGMA quick_check(1)").fetchone()[0]
        if version != FORMAT_VERSION or verdict != "ok":
            error = sqlite3.DatabaseError(f"the index is of version {version}, its check says {verdict}")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error

    @property
    def is_there(self) -> bool:
        """Whether its file still has its name."""
        return self.path.exists()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside, or nothing of it. Inside another one: a part of that."""
        with self._lock:
            if self._is_changing():
                yield
                return
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._sql.execute("COMMIT")
            except BaseException:
                if self._is_changing():  # not where the failure itself has ended it
                    self._sql.execute("ROLLBACK")
                raise

    def _is_changing(self) -> bool:
        return self._sql.in_transaction

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[IndexedBlock]:
        with self._lock:
            found = self._sql.execute(statement, values).fetchall()
        return [
            IndexedBlock(block, lineage, key, parent, bool(holds), num_tokens, Place(segment, offset, size), used_s)
            for block, lineage, key, parent, holds, num_tokens, segment, offset, size, used_s in found
        ]

    def _all(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        with self._lock:
            return self._sql.execute(statement, values).fetchall()

    # Lineages

    def lineages(self) -> dict[tuple[bytes, bytes], int]:
        """(fingerprint, layout) -> the number that rows carry."""
        with self._lock:
            found = self._sql.execute("SELECT fingerprint, layout, lineage FROM lineages").fetchall()
        return {(fingerprint, layout): lineage for fingerprint, layout, lineage in found}

    def lineage_of(self, header: BlockHeader) -> int:
        """The number of a header's lineage, given now where it has none yet. Inside a transaction."""
        lineage = (header.fingerprint, header.layout)
        self._sql.execute("INSERT OR IGNORE INTO lineages(fingerprint, layout) VALUES(?, ?)", lineage)
        statement = "SELECT lineage FROM lineages WHERE fingerprint = ? AND layout = ?"
        return int(self._sql.execute(statement, lineage).fetchone()[0])

    # Blocks

    def find(self, lineages: Collection[int], keys: Iterable[bytes]) -> dict[bytes, IndexedBlock]:
        """The rows of keys, of those lineages only."""
        wanted, found = list(keys), {}
        for start in range(0, len(wanted), _KEYS_AT_ONCE):
            piece = wanted[start : start + _KEYS_AT_ONCE]
            for lineage in lineages:
                marks = ",".join("?" * len(piece))
                statement = f"SELECT {_COLUMNS} FROM blocks WHERE lineage = ? AND key IN ({marks})"
                found.update({row.key: row for row in self._rows(statement, [lineage, *piece])})
        return found

    def add(self, headers: Sequence[BlockHeader], places: Sequence[Place], used_s: Sequence[float]) -> None:
        """Rows for records that were written, in the order of their chains. Inside a transaction."""
        lineages = {(header.fingerprint, header.layout): self.lineage_of(header) for header in headers}
        used = self._next_use() + len(headers)
        self._sql.executemany(
            "INSERT INTO blocks VALUES(NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    *(lineages[header.fingerprint, header.layout], header.key, header.parent, header.holds_parent),
                    *(header.num_tokens, place.segment, place.offset, place.payload_bytes, used - i, second),
                )
                for i, (header, place, second) in enumerate(zip(headers, places, used_s, strict=True))
            ],
        )

    def touch(self, uses: Iterable[tuple[int, float]]) -> None:
        """Uses of blocks, (row, second) each, the oldest first."""
        with self.transaction():
            used = self._next_use()
            rows = [(used + i, second, block) for i, (block, second) in enumerate(uses)]
            self._sql.executemany("UPDATE blocks SET used = ?, used_s = ? WHERE block = ?", rows)

    def _next_use(self) -> int:
        return int(self._sql.execute("SELECT COALESCE(MAX(used), 0) + 1 FROM blocks").fetchone()[0])

    def move(self, block: int, place: Place) -> None:
        """A record lies elsewhere now. Inside a transaction."""
        self._sql.execute(
            "UPDATE blocks SET segment = ?, offset = ? WHERE block = ?", (place.segment, place.offset, block)
        )

    def remove(self, blocks: Iterable[int]) -> None:
        """Forget rows. Inside a transaction."""
        self._sql.executemany("DELETE FROM blocks WHERE block = ?", [(block,) for block in blocks])

    def oldest_free(self, kept: Collection[int]) -> IndexedBlock | None:
        """The row whose last use is longest ago, of those that hold up no other and are not `kept`."""
        statement = f"SELECT {_COLUMNS} FROM blocks b WHERE NOT {_HELD} ORDER BY used LIMIT ?"
        found = [row for row in self._rows(statement, [len(kept) + 1 if kept else 1]) if row.block not in kept]
        return found[0] if found else None

    def expired(self, before_s: float) -> list[IndexedBlock]:
        """Rows last used before that time that hold up no other."""
        return self._rows(f"SELECT {_COLUMNS} FROM blocks b WHERE used_s < ? AND NOT {_HELD}", [before_s])

    def set_back(self, now_s: float) -> None:
        """Uses in the future happened now: the clock was ahead."""
        with self.transaction():
            self._sql.execute("UPDATE blocks SET used_s = ? WHERE used_s > ?", (now_s, now_s))

    def continuations(self, block: int) -> list[IndexedBlock]:
        """A row and all that cannot be without it."""
        return self._rows(
            f"""WITH RECURSIVE gone(block, lineage, key) AS (
                    SELECT block, lineage, key FROM blocks WHERE block = ?
                    UNION SELECT c.block, c.lineage, c.key FROM blocks c
                    JOIN gone ON c.lineage = gone.lineage AND c.parent = gone.key WHERE c.holds_parent)
                SELECT {_COLUMNS} FROM blocks WHERE block IN (SELECT block FROM gone)""",
            [block],
        )

    def orphans(self) -> list[IndexedBlock]:
        """Rows whose parent must be there and is not."""
        return self._rows(
            f"""SELECT {_COLUMNS} FROM blocks b WHERE holds_parent AND parent != ? AND NOT EXISTS(
                    SELECT 1 FROM blocks p WHERE p.lineage = b.lineage AND p.key = b.parent)""",
            [ROOT],
        )

    def rows(self) -> list[IndexedBlock]:
        """All rows, the newest use first."""
        return self._rows(f"SELECT {_COLUMNS} FROM blocks ORDER BY used DESC")

    def keys(self, lineages: Collection[int]) -> list[bytes]:
        """The keys of those lineages."""
        marks = ",".join("?" * len(lineages))
        with self._lock:
            found = self._sql.execute(f"SELECT key FROM blocks WHERE lineage IN ({marks})", list(lineages)).fetchall()
        return [key for (key,) in found]

    def has(self, blocks: Collection[int]) -> bool:
        """Whether all those rows are there."""
        return all(self._all("SELECT 1 FROM blocks WHERE block = ?", [block]) for block in blocks)

    @property
    def num_blocks(self) -> int:
        return int(self._all("SELECT COUNT(*) FROM blocks")[0][0])

    # Segments

    def segments(self) -> dict[int, int]:
        """How far each segment has been read into this index."""
        return dict(self._all("SELECT segment, end FROM segments"))

    def set_end(self, segment: int, end: int) -> None:
        """Inside a transaction."""
        self._sql.execute("INSERT OR REPLACE INTO segments VALUES(?, ?)", (segment, end))

    def drop_segment(self, segment: int) -> None:
        """Inside a transaction."""
        self._sql.execute("DELETE FROM segments WHERE segment = ?", (segment,))

    def lying_in(self, segment: int) -> list[IndexedBlock]:
        """The rows of one segment in the order in which they lie."""
        return self._rows(f"SELECT {_COLUMNS} FROM blocks WHERE segment = ? ORDER BY offset", [segment])

    def empty_segments(self) -> list[int]:
        """Segments that no row names."""
        statement = (
            "SELECT segment FROM segments s WHERE NOT EXISTS(SELECT 1 FROM blocks b WHERE b.segment = s.segment)"
        )
        return [segment for (segment,) in self._all(statement)]

    def live_bytes(self) -> dict[int, int]:
        """Bytes of the records that rows name, for each segment."""
        statement = "SELECT segment, payload_bytes, COUNT(*) FROM blocks GROUP BY segment, payload_bytes"
        live: dict[int, int] = {}
        for segment, payload_bytes, count in self._all(statement):
            live[segment] = live.get(segment, 0) + Place(segment, 0, payload_bytes).num_bytes * count
        return live

    # The file

    def checkpoint(self) -> None:
        """Move what is written into the main file, and cut SQLite's own log. A reader elsewhere may keep it waiting."""
        with self._lock:
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def shrink(self) -> None:
        """Give back the pages of rows that are gone."""
        with self._lock:
            self._sql.execute("VACUUM")
        self.checkpoint()

    def close(self) -> None:
        """A second call does nothing."""
        with self._lock:
            self._sql.close()
