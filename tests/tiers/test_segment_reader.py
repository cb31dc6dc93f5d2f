"""Records that come out of segments: whole, in pieces, announced ahead, and what a file does that is cut or gone."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from ktransformer2.tiers import segment_reader
from ktransformer2.tiers.disk_directory import segment_name
from ktransformer2.tiers.header import BlockHeader
from ktransformer2.tiers.read_memory import ReadMemory
from ktransformer2.tiers.segment_reader import Record, read
from ktransformer2.tiers.segments import PAGE_BYTES, Place, SegmentWriter
from tests.tiers.disk_factories import PAYLOAD_BYTES, RECORD_BYTES, chain, lineage

MODEL = lineage()
MEMORY = ReadMemory()
RECORDS = [(BlockHeader.describe(block, MODEL, 0.0), block.payload) for block in chain("a", 6)]
PLACES = [Place(segment, i * RECORD_BYTES, PAYLOAD_BYTES) for segment in (1, 2) for i in range(3)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two segments of three records each."""
    for segment in (1, 2):
        writer = SegmentWriter.create(tmp_path, segment)
        writer.append(RECORDS[3 * segment - 3 : 3 * segment])
        writer.close()
    return tmp_path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_reader, "PIECE_BYTES", 2 * RECORD_BYTES)


def must_not_fail(error: OSError) -> None:
    raise AssertionError(error)


def contents(records: list[Record]) -> list[tuple[BlockHeader | None, bytes]]:
    return [(record.header, bytes(record.payload)) for record in records]


@pytest.mark.usefixtures("small_pieces")
def test_records_come_back_in_the_order_in_which_they_lie_a_piece_at_a_time(directory: Path) -> None:
    pieces = list(read(directory, PLACES[::-1], MEMORY, must_not_fail))
    assert [[place for place, _ in piece] for piece in pieces] == [PLACES[:2], PLACES[2:3], PLACES[3:5], PLACES[5:]]
    assert contents([record for piece in pieces for _, record in piece]) == RECORDS
    assert list(read(directory, [], MEMORY, must_not_fail)) == []


def test_what_lies_behind_the_end_reads_as_zeros(directory: Path) -> None:
    os.truncate(directory / segment_name(1), RECORD_BYTES + PAGE_BYTES + 10)
    memory = ReadMemory()
    reading = memory.take(1)
    list(read(directory, PLACES[3:], memory, must_not_fail))  # the memory has been used
    assert memory.spare_bytes
    (piece,) = read(directory, PLACES[:3], memory, must_not_fail)
    del reading
    found = [record for _, record in piece]
    assert [record.header for record in found] == [RECORDS[0][0], RECORDS[1][0], None]
    assert found[0].payload == RECORDS[0][1]
    assert found[1].payload == bytes(RECORDS[1][1])[:10] + bytes(PAYLOAD_BYTES - 10)
    assert found[2].payload == bytes(PAYLOAD_BYTES)


def test_what_cannot_be_read_is_left_out_and_told_of(directory: Path) -> None:
    (directory / segment_name(1)).unlink()
    failures: list[OSError] = []
    (piece,) = read(directory, PLACES, MEMORY, failures.append)
    assert [place for place, _ in piece] == PLACES[3:]
    assert [type(error) for error in failures] == [FileNotFoundError]


def test_no_memory_is_a_failure_like_any(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    failures: list[OSError] = []
    assert list(read(directory, PLACES, ReadMemory(), failures.append)) == []
    assert [error.errno for error in failures] == [errno.ENOMEM]


def test_a_read_that_stops_short_goes_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, pieces, offset: real(file, [pieces[0][:5000]], offset))
    (piece,) = read(directory, PLACES[:3], MEMORY, must_not_fail)
    assert contents([record for _, record in piece]) == RECORDS[:3]


@pytest.mark.usefixtures("small_pieces")
def test_the_system_reads_ahead_in_a_file_that_stays_open_from_piece_to_piece(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, int]] = []
    used: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        used.append(os.fstat(descriptor).st_ino)
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(os, "posix_fadvise", lambda _, *range_and_hint: told.append(range_and_hint))
    monkeypatch.setattr(os, "preadv", preadv)
    list(read(directory, PLACES, MEMORY, must_not_fail))
    assert told == [(0, 0, os.POSIX_FADV_SEQUENTIAL)] * 2, "once a file"
    first, second = ((directory / segment_name(segment)).stat().st_ino for segment in (1, 2))
    assert used == [first, first, second, second], "two pieces each"


def test_a_piece_that_cannot_be_read_leaves_the_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def preadv(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        if offset == RECORD_BYTES:
            raise OSError(errno.EIO, "a bad sector")
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(segment_reader, "PIECE_BYTES", RECORD_BYTES)
    monkeypatch.setattr(os, "preadv", preadv)
    failures: list[OSError] = []
    pieces = list(read(directory, PLACES, MEMORY, failures.append))
    assert [place for piece in pieces for place, _ in piece] == [*PLACES[0:3:2], *PLACES[3:6:2]]
    assert [error.errno for error in failures] == [errno.EIO, errno.EIO]


def test_a_link_is_never_followed(directory: Path) -> None:
    (directory / "outside").write_bytes(b"not ours")
    (directory / segment_name(3)).symlink_to(directory / "outside")
    failures: list[OSError] = []
    assert list(read(directory, [Place(3, 0, 4)], MEMORY, failures.append)) == []
    assert "symbolic links" in str(failures[0])
