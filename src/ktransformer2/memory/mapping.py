"""The system calls under the arena: reserve a range of addresses, give memory back, advise on huge pages, count what is
resident; and giving back what a mapped file holds. Knows no limit, no run and no extent; the one file here that knows
the operating system.

Invariants: the range is readable and writable from start to stop and costs nothing until it is touched; a page stands
on each side of it that nothing may touch, so an overrun of the range is a crash and no neighbour's mapping merges with
it. What `release` was given is zero when it is touched again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from functools import cache

from ktransformer2.errors import ConfigError, OutOfMemoryError

_LINUX = sys.platform == "linux"
_PROT_NONE = 0
_MAP_FIXED = 0x10
# MAP_NORESERVE exists under these values only on Linux; macOS over-commits by itself.
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANON | (0x4000 if _LINUX else 0) if sys.platform != "win32" else 0
_MADV_DONTNEED = 4
_MADV_FREE = 8
_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_MADV_COLLAPSE = 25
_MAP_FAILED = ctypes.c_void_p(-1).value
_HUGE_SIZE_FILE = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"
_MAX_SPAN_BYTES = 2**63
# mincore writes one byte a page; asking in pieces keeps that buffer small.
_MINCORE_PIECE_BYTES = 2**28


@cache
def _libc() -> ctypes.CDLL:
    if sys.platform == "win32":
        raise ConfigError("the memory arena needs mmap and madvise: Linux or macOS; on Windows use WSL2")
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.mprotect.argtypes = [pointer, size, number]
    libc.madvise.argtypes = [pointer, size, number]
    libc.mincore.argtypes = [pointer, size, pointer]
    return libc


def huge_page_bytes() -> int:
    """Size of a transparent huge page; 0 where the system has none that a program can ask for."""
    try:
        with open(_HUGE_SIZE_FILE, encoding="ascii") as file:
            return int(file.read())
    except OSError:
        return 0


class MappedFiles:
    """Where files are mapped into this process when this is made; nowhere, where the system does not tell."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if not _LINUX:
            return
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
                if inode != "0":
                    start, stop = (int(part, 16) for part in addresses.split("-"))
                    self._ranges.append((start, stop))

    def forget(self, address: int, num_bytes: int) -> None:
        """Whole pages of the range that are a file's are no longer held by this process; a touch reads them again.

        What was written to them, and not to the file, is lost: for what nobody will read any more.
        """
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(start <= first and last <= stop for start, stop in self._ranges):
            result = _libc().madvise(first, last - first, _MADV_DONTNEED)
            assert result == 0, f"madvise({first:#x}, {last - first}): {os.strerror(ctypes.get_errno())}"


class Mapping:
    """One reserved range of addresses. Unmapped by `close`, or when nobody refers to it any more."""

    def __init__(self, num_bytes: int, alignment: int) -> None:
        """`num_bytes` and `alignment` are multiples of the page size.

        Raises: ConfigError for more than addresses can name; OutOfMemoryError if the system refuses.
        """
        libc, self.page_bytes = _libc(), mmap.PAGESIZE
        span = num_bytes + alignment + 2 * self.page_bytes
        if not 0 < num_bytes < span < _MAX_SPAN_BYTES:  # a larger number would reach the system with its top bits cut
            raise ConfigError(f"{num_bytes} bytes of addresses are not allowed; allowed: 1 to {_MAX_SPAN_BYTES} (2^63)")
        found = libc.mmap(None, span, _PROT_NONE, _MAP_FLAGS, -1, 0)
        if found is None or found == _MAP_FAILED:
            raise OutOfMemoryError(
                f"the system refuses {span} bytes of address space ({os.strerror(ctypes.get_errno())}); "
                "lower memory=, or raise `ulimit -v`"
            )
        self._finalizer = weakref.finalize(self, libc.munmap, found, span)
        self.start: int = -(-(found + self.page_bytes) // alignment) * alignment
        self.stop = self.start + num_bytes
        if libc.mprotect(self.start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
            reason = os.strerror(ctypes.get_errno())
            self.close()
            raise OutOfMemoryError(
                f"the system refuses {num_bytes} bytes of writable address space ({reason}); "
                "lower memory=, or allow over-commit (vm.overcommit_memory=0)"
            )
        self.advise_small(self.start, num_bytes)

    def close(self) -> None:
        """Unmap. Every pointer into the range is invalid from here on."""
        self._finalizer()

    def release(self, address: int, num_bytes: int, cuts_huge_pages: bool) -> None:
        """Give the memory behind whole pages back to the system; the addresses stay reserved.

        `cuts_huge_pages`: an end of the range may lie inside a huge page. DONTNEED alone only unmaps a part of such a
        page and keeps all of it until memory runs out (on Linux 6.18, 0 of 482 MiB came back); FREE splits it first.
        """
        libc = _libc()
        if not _LINUX:
            # madvise is a hint there. A fresh mapping over the old one is not: its pages are gone at once.
            flags, access = _MAP_FLAGS | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
            found = libc.mmap(address, num_bytes, access, flags, -1, 0)
            assert found == address, f"mmap over {address:#x} gave {found}: {os.strerror(ctypes.get_errno())}"
            return
        if cuts_huge_pages:
            libc.madvise(
                address, num_bytes, _MADV_FREE
            )  # only to split; DONTNEED below gives back whether it did or not
        result = libc.madvise(address, num_bytes, _MADV_DONTNEED)
        assert result == 0, f"madvise({address:#x}, {num_bytes}): {os.strerror(ctypes.get_errno())}"

    def advise_huge(self, address: int, num_bytes: int) -> bool:
        """Allow huge pages in a range of whole ones. False: the system does not want to; nothing is lost but speed."""
        return _LINUX and _libc().madvise(address, num_bytes, _MADV_HUGEPAGE) == 0

    def advise_small(self, address: int, num_bytes: int) -> None:
        """No huge page from here on in a range: a touch must not take memory beside what it touches."""
        if _LINUX:
            _libc().madvise(address, num_bytes, _MADV_NOHUGEPAGE)  # fails only on kernels without huge pages

    def collapse(self, address: int, num_bytes: int) -> bool:
        """Make huge pages of touched small ones now, by copying. False: not possible at present."""
        return _LINUX and _libc().madvise(address, num_bytes, _MADV_COLLAPSE) == 0

    def resident_bytes(self) -> int:
        """Physical memory behind the range. Cost: milliseconds."""
        return self._resident_from_smaps() if _LINUX else self._resident_from_mincore()

    def _resident_from_smaps(self) -> int:
        total, inside = 0, False
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, rest = line.partition(" ")
                if not name.endswith(
                    ":"
                ):  # `start-stop perms offset ...` opens a mapping; `Key:  value kB` tells of it
                    first, last = (int(part, 16) for part in name.split("-"))
                    inside = first >= self.start and last <= self.stop
                elif inside and name == "Rss:":
                    total += int(rest.split()[0]) * 1024
        return total

    def _resident_from_mincore(self) -> int:
        """An upper bound where the system counts pages that it could take back without asking."""
        libc, pages = _libc(), 0
        for start in range(self.start, self.stop, _MINCORE_PIECE_BYTES):
            num_bytes = min(_MINCORE_PIECE_BYTES, self.stop - start)
            found = ctypes.create_string_buffer(-(-num_bytes // self.page_bytes))
            result = libc.mincore(start, num_bytes, found)
            assert result == 0, f"mincore({start:#x}, {num_bytes}): {os.strerror(ctypes.get_errno())}"
            pages += sum(byte & 1 for byte in found.raw)
        return pages * self.page_bytes
