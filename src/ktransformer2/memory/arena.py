"""The bytes of the cache: a reserved range of addresses, power-of-two runs of it, and memory committed inside the runs.

Reserved is not committed: a run costs nothing until `commit` counts some of it against the hard limit, and `decommit`
gives that memory back so that the system sees it. Bytes that lie elsewhere (tables, gathered views, copies in flight)
are counted by `charge`. Knows no extent, no block and no token: `SlabPool` cuts runs into extents and asks for memory.

Whoever holds committed memory that it does not use registers as a `Reclaimable`; nothing is refused before those were
asked to give back. No room is a return value; only a limit that makes no sense, or a system without address space, is
an error.

Huge pages: a unit (2 MiB on most systems) may be one only while all of it is committed. Elsewhere they are switched
off, so that touching one committed byte never takes memory that was not counted; resident <= committed, always.

Invariants: committed + charged <= limit; committed ranges lie inside taken runs and never overlap.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Protocol, Self

from ktransformer2.config import MAX_MEMORY_BYTES
from ktransformer2.errors import ConfigError, OutOfMemoryError
from ktransformer2.layout import EXTENT_ALIGNMENT, round_up
from ktransformer2.memory.buddy import Buddy
from ktransformer2.memory.mapping import Mapping, huge_page_bytes
from ktransformer2.memory.ranges import RangeSet

SMALLEST_RUN_BYTES = 2**21
# Address space is not memory. Each pool may spread the whole limit over runs of which it keeps a little: eight pools'
# worth of addresses, so that a pool which is entitled to bytes never lacks addresses to put them at.
_RESERVE_PER_LIMIT = 8
_LEAST_RUNS = 64  # a tiny limit needs addresses for several pools too


class Reclaimable(Protocol):
    """Holds committed memory that it may not need."""

    @property
    def reclaimable_bytes(self) -> int: ...

    def give_back(self, num_bytes: int) -> int:
        """Decommit at least `num_bytes` where possible; returns how many it was."""
        ...


@dataclass
class ArenaStats:
    """Counters and levels of an arena. Calls count what was granted; `refused_*` what the limit did not allow."""

    limit_bytes: int
    reserved_bytes: int
    committed_bytes: int = 0
    charged_bytes: int = 0
    peak_bytes: int = 0
    commit_calls: int = 0
    decommit_calls: int = 0
    refused_commits: int = 0
    refused_charges: int = 0
    reclaim_calls: int = 0
    reclaimed_bytes: int = 0
    growth_events: int = 0
    shrink_events: int = 0
    huge_page_calls: int = 0
    collapsed_huge_pages: int = 0

    @property
    def used_bytes(self) -> int:
        """What counts against the limit."""
        return self.committed_bytes + self.charged_bytes


class Arena:
    """A buddy allocator over reserved addresses, and the count of everything against `limit_bytes`."""

    def __init__(self, limit_bytes: int, reserve_bytes: int | None = None) -> None:
        """Reserves `reserve_bytes` of addresses, rounded up to a power of two.

        The default is 8 x the limit, or less where the system refuses that.

        Raises: ConfigError for a limit below one page or above 64 TiB, and for a reserve below the limit or above 8 x
        that; OutOfMemoryError without enough addresses.
        """
        if not EXTENT_ALIGNMENT <= limit_bytes <= MAX_MEMORY_BYTES:
            raise ConfigError(
                f"limit_bytes={limit_bytes} is not allowed; allowed: {EXTENT_ALIGNMENT} to {MAX_MEMORY_BYTES} bytes"
            )
        most = MAX_MEMORY_BYTES * _RESERVE_PER_LIMIT
        if reserve_bytes is not None and not limit_bytes <= reserve_bytes <= most:
            raise ConfigError(
                f"reserve_bytes={reserve_bytes} is not allowed; allowed: limit_bytes={limit_bytes} to {most} bytes"
            )
        self._huge_bytes = huge_page_bytes()
        self._mapping = self._reserve(limit_bytes, reserve_bytes)
        self._start = self._mapping.start
        reserved = self._mapping.stop - self._mapping.start
        self._buddy = Buddy(reserved, SMALLEST_RUN_BYTES)
        self._committed = RangeSet()
        self._huge = RangeSet()
        self._holders: list[Reclaimable] = []
        self.stats = ArenaStats(limit_bytes, reserved)

    def _reserve(self, limit_bytes: int, reserve_bytes: int | None) -> Mapping:
        """The range asked for; by default the widest that is granted: a strict system counts addresses as memory."""
        wanted = reserve_bytes or max(limit_bytes * _RESERVE_PER_LIMIT, SMALLEST_RUN_BYTES * _LEAST_RUNS)
        size = max(SMALLEST_RUN_BYTES, 1 << (wanted - 1).bit_length())
        while True:
            try:
                return Mapping(size, max(self._huge_bytes, mmap.PAGESIZE))
            except OutOfMemoryError:
                if reserve_bytes is not None or size // 2 < max(limit_bytes, SMALLEST_RUN_BYTES):
                    raise
                size //= 2

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the whole range back. Pointers into it are invalid from here on; a second call does nothing."""
        self._mapping.close()

    # Runs: addresses only

    def allocate_run(self, num_bytes: int) -> int | None:
        """The address of a run of at least `num_bytes`, none of it committed. None: no free run is that large."""
        offset = self._buddy.take(num_bytes) if num_bytes <= self._buddy.size else None
        return None if offset is None else self._start + offset

    def free_run(self, address: int) -> None:
        """Return a run. All of it must be decommitted."""
        size = self.run_bytes(address)
        assert not self._committed.overlaps(address, address + size), f"run {address:#x} still holds committed memory"
        self._buddy.give_back(address - self._start)

    def run_bytes(self, address: int) -> int:
        """The size of the run that begins at `address`."""
        size = self._buddy.size_of(address - self._start)
        assert size is not None, f"no run begins at {address:#x}"
        return size

    # Bytes: everything that counts

    @property
    def free_bytes(self) -> int:
        """What may still be committed or charged without asking anyone to give back."""
        return self.stats.limit_bytes - self.stats.committed_bytes - self.stats.charged_bytes

    def register(self, holder: Reclaimable) -> None:
        """Ask `holder` from now on to give back before anything is refused."""
        self._holders.append(holder)

    def unregister(self, holder: Reclaimable) -> None:
        self._holders.remove(holder)

    def make_room(self, num_bytes: int, besides: Reclaimable | None = None) -> bool:
        """Whether `num_bytes` may be committed or charged, after asking holders, other than `besides`, to give back.

        Side effect: holders decommit what is missing; nobody is asked in vain.
        """
        missing = num_bytes - self.free_bytes
        if missing <= 0:
            return True
        if missing > sum(holder.reclaimable_bytes for holder in self._holders if holder is not besides):
            return False
        return self.reclaim(missing, besides) >= missing

    def reclaim(self, num_bytes: int, besides: Reclaimable | None = None) -> int:
        """Ask holders, other than `besides`, to give `num_bytes` back, the one that holds most first. Returns bytes."""
        given = 0
        self.stats.reclaim_calls += 1
        for holder in sorted(self._holders, key=lambda holder: -holder.reclaimable_bytes):
            if given < num_bytes and holder is not besides:
                given += holder.give_back(num_bytes - given)
        self.stats.reclaimed_bytes += given
        return given

    def commit(self, address: int, num_bytes: int) -> bool:
        """Count a part of a run as memory in use; it may be touched from here on. False: the limit would be passed."""
        start, stop = self._checked(address, num_bytes)
        if not self.make_room(num_bytes):
            self.stats.refused_commits += 1
            return False
        whole = self._committed.add(start, stop)
        self.stats.committed_bytes += num_bytes
        self.stats.commit_calls += 1
        self._note_peak()
        self._allow_huge_pages(start, stop, whole)
        return True

    def decommit(self, address: int, num_bytes: int) -> None:
        """Give committed memory back to the system. Its content is lost; the addresses stay in their run."""
        start, stop = self._checked(address, num_bytes)
        self._committed.remove(start, stop)
        self.stats.committed_bytes -= num_bytes
        self.stats.decommit_calls += 1
        cuts = self._forbid_huge_pages(start, stop)
        start, stop = self._whole_pages(start, stop)
        if start < stop:
            self._mapping.release(start, stop - start, cuts_huge_pages=cuts)

    def charge(self, num_bytes: int) -> bool:
        """Count bytes that lie outside the arena. False: the limit would be passed, nothing was counted."""
        assert num_bytes >= 0, f"charge of {num_bytes} bytes"
        if not self.make_room(num_bytes):
            self.stats.refused_charges += 1
            return False
        self.stats.charged_bytes += num_bytes
        self._note_peak()
        return True

    def discharge(self, num_bytes: int) -> None:
        """Stop counting bytes that `charge` counted."""
        assert 0 <= num_bytes <= self.stats.charged_bytes, f"discharge {num_bytes} of {self.stats.charged_bytes} bytes"
        self.stats.charged_bytes -= num_bytes

    def resident_bytes(self) -> int:
        """Physical memory behind the arena, as the system counts it. Cost: milliseconds."""
        return self._mapping.resident_bytes()

    def is_committed(self, address: int, num_bytes: int) -> bool:
        """Whether all of a range is committed."""
        return self._committed.around(address, address + num_bytes) is not None

    def check_integrity(self) -> None:
        """Recounts runs, committed ranges and huge pages. Cost: linear in their number."""
        self._buddy.check_integrity()
        self._committed.check_integrity()
        self._huge.check_integrity()
        stats = self.stats
        assert stats.committed_bytes == self._committed.total, f"{stats.committed_bytes} != {self._committed.total}"
        assert stats.used_bytes <= stats.peak_bytes <= stats.limit_bytes, f"the limit was passed: {stats}"
        runs = RangeSet()
        for offset, size in self._buddy.runs():
            runs.add(self._start + offset, self._start + offset + size)
        for start, stop in self._committed:
            assert runs.around(start, stop) is not None, f"committed {start:#x}:{stop:#x} is not all in taken runs"
        for start, stop in self._huge:
            assert self._committed.around(start, stop) is not None, f"huge pages {start:#x}:{stop:#x} not all committed"

    def _checked(self, address: int, num_bytes: int) -> tuple[int, int]:
        """(start, stop) of a range that lies in the arena on the right boundaries."""
        start, stop = address, address + num_bytes
        assert (start | stop) % EXTENT_ALIGNMENT == 0, f"{num_bytes} bytes at {start:#x}: not multiples of a page"
        assert self._start <= start < stop <= self._mapping.stop, f"{num_bytes} bytes at {start:#x}: outside the arena"
        return start, stop

    def _note_peak(self) -> None:
        self.stats.peak_bytes = max(self.stats.peak_bytes, self.stats.used_bytes)

    def _allow_huge_pages(self, start: int, stop: int, whole: tuple[int, int]) -> None:
        """Units that the commit of [start, stop) completed may be huge; `whole` is the committed range around it."""
        unit = self._huge_bytes
        if not unit:
            return
        low = max(start // unit * unit, round_up(whole[0], unit))
        high = min(round_up(stop, unit), whole[1] // unit * unit)
        if low >= high:
            return
        self.stats.huge_page_calls += 1
        if not self._mapping.advise_huge(low, high - low):
            return
        self._huge.add(low, high)
        # A unit that was committed in parts may hold small pages already: only a copy makes it huge. At most two a
        # commit.
        edges = {at for at in (low, high - unit) if at < start or at + unit > stop}
        self.stats.collapsed_huge_pages += sum(self._mapping.collapse(at, unit) for at in edges)

    def _forbid_huge_pages(self, start: int, stop: int) -> bool:
        """Units that lose a part of [start, stop) may be huge no longer. True: such a unit keeps another part."""
        unit = self._huge_bytes
        if not unit:
            return False
        cuts = False
        for low, high in self._huge.within(start // unit * unit, round_up(stop, unit)):
            self._huge.remove(low, high)
            self._mapping.advise_small(low, high - low)
            cuts = cuts or low < start or high > stop
        return cuts

    def _whole_pages(self, start: int, stop: int) -> tuple[int, int]:
        """[start, stop) widened to system pages, or narrowed where a page is shared with memory still committed.

        Only where a system page is larger than an extent's alignment (16 KiB on macOS, 64 KiB on some arm64 Linux).
        """
        page = self._mapping.page_bytes
        low, high = start // page * page, round_up(stop, page)
        if self._committed.overlaps(low, start):
            low += page
        if self._committed.overlaps(stop, high):
            high -= page
        return low, high
