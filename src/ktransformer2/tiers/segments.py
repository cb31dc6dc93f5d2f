"""Segment files: records one behind the other; how they are added, found again, wiped and discarded.

    record = header, padded to a page | payload, padded to a page          page = 4,096 bytes

A record says by itself what it is, so a file needs no other beside it. Bytes are added at the end, read in place, and
given back in place: a range that is wiped reads as zeros, and takes no room where the file system can leave holes.

Knows no index, no order and no limit. Every call opens the file anew: one that was deleted is gone at once, and a
number that was given to a new file is never read through the old one.

Invariants: a record never crosses into another; one that was written in part is cut off before anything follows it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ktransformer2.tiers.disk_directory import is_at, segment_name, try_lock
from ktransformer2.tiers.header import HEADER_BYTES, BlockHeader, Bytes

PAGE_BYTES = 4096
# One call carries at most so many records (IOV_MAX is 1,024; one is written from up to three pieces) and so many bytes.
MAX_RECORDS_PER_CALL = 340
MAX_BYTES_PER_CALL = 2**30
_ZEROS = bytes(2**20)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


@dataclass(frozen=True)
class Place:
    """Where a record lies."""

    segment: int
    offset: int
    payload_bytes: int

    @property
    def num_bytes(self) -> int:
        return record_bytes(self.payload_bytes)

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


def record_bytes(payload_bytes: int) -> int:
    """What a payload of that size takes in a segment."""
    return PAGE_BYTES + _whole_pages(payload_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def adjacent(places: Iterable[Place], most_bytes: int = MAX_BYTES_PER_CALL) -> list[list[Place]]:
    """Places in the order in which they lie, those side by side together, up to what one call is to reach."""
    runs: list[list[Place]] = []
    for place in sorted(places, key=lambda place: (place.segment, place.offset)):
        run = runs[-1] if runs else []
        follows = bool(run) and (run[-1].segment, run[-1].end) == (place.segment, place.offset)
        if follows and len(run) < MAX_RECORDS_PER_CALL and place.end - run[0].offset <= most_bytes:
            run.append(place)
        else:
            runs.append([place])
    return runs


@contextmanager
def opened(directory: Path, segment: int, flags: int) -> Iterator[int]:
    """A descriptor of a segment. Raises: OSError where there is none, or only a link of that name."""
    descriptor = os.open(directory / segment_name(segment), flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def scan(directory: Path, segment: int, start: int) -> Iterator[tuple[Place, BlockHeader]]:
    """The records of a segment from `start` on, by their headers; damage is stepped over, page by page.

    A record that the file's end cuts is none. The payloads are not read. Raises: OSError.
    """
    with opened(directory, segment, os.O_RDONLY) as descriptor:
        size, offset = os.fstat(descriptor).st_size, start
        while (offset := _next_data(descriptor, offset, size)) < size:
            header = BlockHeader.unpack(os.pread(descriptor, HEADER_BYTES, offset))
            if header is not None and offset + PAGE_BYTES + header.payload_bytes <= size:
                place = Place(segment, offset, header.payload_bytes)
                yield place, header
                offset = place.end
            else:
                offset += PAGE_BYTES


def _next_data(descriptor: int, offset: int, size: int) -> int:
    """The first page at or behind `offset` that is not in a hole."""
    if offset >= size or sys.platform != "linux":
        return offset
    try:
        found = os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else offset  # nothing but a hole; or holes are not told here
    return max(offset, found // PAGE_BYTES * PAGE_BYTES)


def wipe(directory: Path, segment: int, offset: int, num_bytes: int) -> None:
    """Make a range read as zeros, and give its room back where the file system can. Raises: OSError."""
    with opened(directory, segment, os.O_RDWR) as descriptor:
        num_bytes = min(num_bytes, os.fstat(descriptor).st_size - offset)
        if num_bytes <= 0 or _punch(descriptor, offset, num_bytes):
            return
        for start in range(offset, offset + num_bytes, len(_ZEROS)):
            _write_all(descriptor, [memoryview(_ZEROS)[: offset + num_bytes - start]], start)


def _punch(descriptor: int, offset: int, num_bytes: int) -> bool:
    """Leave a hole. False: the system or the file system knows none."""
    punch = _fallocate()
    if punch is None:
        return False
    if punch(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, num_bytes) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The C library's call; Python has only `posix_fallocate`, which leaves no holes."""
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    return call


def discard(path: Path) -> None:
    """Delete a file. It is emptied first: whoever has it open must not keep its bytes alive. Raises: OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)
        os.unlink(path)
    except FileNotFoundError:
        return


class SegmentWriter:
    """The end of one segment, held by a lock on the file for as long as this process may add to it."""

    def __init__(self, directory: Path, segment: int, descriptor: int, end: int) -> None:
        """Takes over an open, locked descriptor. Side effect: what lies behind `end` is cut off. Raises: OSError."""
        self.segment, self.end = segment, end
        self._path, self._descriptor = directory / segment_name(segment), descriptor
        self._is_whole = True
        try:
            os.ftruncate(descriptor, end)
        except OSError:
            self.close()
            raise

    @classmethod
    def create(cls, directory: Path, segment: int) -> SegmentWriter:
        """A new file of that number, or of the next that no other file has. Raises: OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            try:
                descriptor = os.open(directory / segment_name(segment), flags, 0o600)
            except FileExistsError:
                segment += 1  # a link or a folder of that name: no segment, and not ours to remove
                continue
            if try_lock(descriptor):  # nobody else can have it yet
                return cls(directory, segment, descriptor, 0)
            os.close(descriptor)

    @classmethod
    def adopt(cls, directory: Path, segment: int, end: int) -> SegmentWriter | None:
        """Go on where a process that is gone has left off. None: another holds it. Raises: OSError."""
        descriptor = os.open(directory / segment_name(segment), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        if try_lock(descriptor):
            return cls(directory, segment, descriptor, end)
        os.close(descriptor)
        return None

    @property
    def is_there(self) -> bool:
        """Whether the file is still the one of that name, and ends where it was left."""
        return self._is_whole and is_at(self._descriptor, self._path) and os.fstat(self._descriptor).st_size == self.end

    def append(self, records: Sequence[tuple[BlockHeader, Bytes]]) -> list[Place]:
        """Write records in one call; where they lie. Raises: OSError, and then none of them is there."""
        places, pieces, end = [], [], self.end
        for header, payload in records:
            places.append(Place(self.segment, end, header.payload_bytes))
            pieces += _pieces(header.pack().ljust(PAGE_BYTES, b"\0"), payload)
            end = places[-1].end
        with self.undone_on_failure():
            _write_all(self._descriptor, pieces, self.end)
            self.end = end
        return places

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """What was appended inside is cut off again if something fails, or nothing is ever written here again."""
        end = self.end
        try:
            yield
        except BaseException:
            self.end = end
            try:
                os.ftruncate(self._descriptor, end)
            except OSError:
                self._is_whole = False
            raise

    def close(self) -> None:
        """Let go of the segment; another process may go on with it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _pieces(head: Bytes, payload: Bytes) -> list[Bytes]:
    """A record as it lies in the file. The padding behind a payload is never looked at."""
    rest = -memoryview(payload).nbytes % PAGE_BYTES
    return [head, payload, bytearray(rest)] if rest else [head, payload]


def _write_all(descriptor: int, pieces: Sequence[Bytes], offset: int) -> None:
    """Write pieces one behind the other. A call that stops short is followed by one that says why. Raises: OSError."""
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        written = os.pwritev(descriptor, left, offset)
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]
