"""Segment files: where records lie, what is scanned of damaged ones, and what wiping leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ktransformer2.tiers import segments
from ktransformer2.tiers.disk_directory import segment_name
from ktransformer2.tiers.header import BlockHeader
from ktransformer2.tiers.segments import PAGE_BYTES, Place, SegmentWriter, adjacent
from tests.tiers.disk_factories import PAYLOAD_BYTES, RECORD_BYTES, chain, lineage

MODEL = lineage()
RECORDS = [(BlockHeader.describe(block, MODEL, 0.0), block.payload) for block in chain("a", 4)]
PLACES = [Place(1, i * RECORD_BYTES, PAYLOAD_BYTES) for i in range(4)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With one segment of four records, that nobody holds."""
    writer = SegmentWriter.create(tmp_path, 1)
    assert writer.append(RECORDS[:2]) == PLACES[:2]
    assert writer.append(RECORDS[2:]) == PLACES[2:]
    writer.close()
    writer.close()
    return tmp_path


def test_a_record_is_a_page_for_the_header_and_whole_pages_for_the_payload(directory: Path) -> None:
    assert (segments.record_bytes(0), segments.record_bytes(1)) == (PAGE_BYTES, 2 * PAGE_BYTES)
    assert segments.record_bytes(PAYLOAD_BYTES) == RECORD_BYTES == 4 * PAGE_BYTES
    content = (directory / segment_name(1)).read_bytes()
    assert len(content) == 4 * RECORD_BYTES
    for place, (header, payload) in zip(PLACES, RECORDS, strict=True):
        record = content[place.offset : place.end]
        assert record[:192] == header.pack()
        assert record[PAGE_BYTES : PAGE_BYTES + PAYLOAD_BYTES] == payload
        assert not any(record[192:PAGE_BYTES] + record[PAGE_BYTES + PAYLOAD_BYTES :])


def test_neighbours_are_read_in_one_call() -> None:
    other = Place(2, 0, PAYLOAD_BYTES)
    shuffled = [PLACES[3], other, PLACES[0], PLACES[1]]
    assert adjacent(shuffled) == [[PLACES[0], PLACES[1]], [PLACES[3]], [other]]
    assert adjacent([]) == []
    many = [Place(1, i * 2 * PAGE_BYTES, 1) for i in range(700)]
    assert [len(run) for run in adjacent(many)] == [340, 340, 20]
    assert [len(run) for run in adjacent(PLACES, 2 * RECORD_BYTES)] == [2, 2]
    assert [len(run) for run in adjacent(PLACES, 1)] == [1, 1, 1, 1], "each is larger than that"


def test_a_scan_steps_over_damage_and_holes_and_stops_at_a_cut(directory: Path) -> None:
    headers = [header for header, _ in RECORDS]
    assert list(segments.scan(directory, 1, 0)) == list(zip(PLACES, headers, strict=True))
    assert list(segments.scan(directory, 1, PLACES[2].offset)) == list(zip(PLACES[2:], headers[2:], strict=True))
    with (directory / segment_name(1)).open("r+b") as file:
        file.write(b"damaged")
    segments.wipe(directory, 1, PLACES[1].offset, RECORD_BYTES)
    os.truncate(directory / segment_name(1), PLACES[3].end - 2 * PAGE_BYTES)
    assert list(segments.scan(directory, 1, 0)) == [(PLACES[2], headers[2])]


@pytest.mark.parametrize("holes", [True, False])
def test_wiped_bytes_read_as_zeros_and_take_no_room(
    directory: Path, monkeypatch: pytest.MonkeyPatch, holes: bool
) -> None:
    if not holes:
        monkeypatch.setattr(segments, "_fallocate", lambda: None)
    file = directory / segment_name(1)
    before, taken = file.read_bytes(), file.stat().st_blocks
    segments.wipe(directory, 1, PLACES[1].offset, 2 * RECORD_BYTES)
    segments.wipe(directory, 1, 100 * RECORD_BYTES, RECORD_BYTES)  # behind the end: nothing to do
    middle = slice(PLACES[1].offset, PLACES[2].end)
    assert file.read_bytes() == before[: middle.start] + bytes(2 * RECORD_BYTES) + before[middle.stop :]
    assert taken - file.stat().st_blocks == (2 * RECORD_BYTES // 512 if holes else 0)


def test_only_one_writer_holds_a_segment_and_the_next_cuts_off_what_was_left_half(directory: Path) -> None:
    first = SegmentWriter.adopt(directory, 1, 3 * RECORD_BYTES)
    assert first is not None
    assert (directory / segment_name(1)).stat().st_size == 3 * RECORD_BYTES
    assert SegmentWriter.adopt(directory, 1, 3 * RECORD_BYTES) is None
    first.close()
    second = SegmentWriter.adopt(directory, 1, 3 * RECORD_BYTES)
    assert second is not None
    assert second.append(RECORDS[3:]) == PLACES[3:]
    second.close()


def is_there(writer: SegmentWriter) -> bool:
    return writer.is_there


def test_a_writer_knows_when_its_file_is_another_or_gone(directory: Path) -> None:
    writer = SegmentWriter.adopt(directory, 1, 4 * RECORD_BYTES)
    assert writer is not None
    assert is_there(writer)
    file = directory / segment_name(1)
    os.truncate(file, RECORD_BYTES)
    assert not is_there(writer)
    os.truncate(file, 4 * RECORD_BYTES)
    assert is_there(writer)
    file.rename(directory / "elsewhere")
    assert not is_there(writer)
    file.write_bytes(bytes(4 * RECORD_BYTES))
    assert not is_there(writer)
    writer.close()


def test_discarding_frees_the_bytes_of_who_has_it_open(directory: Path) -> None:
    with (directory / segment_name(1)).open("rb") as still_open:
        segments.discard(directory / segment_name(1))
        assert os.fstat(still_open.fileno()).st_size == 0
    assert not (directory / segment_name(1)).exists()
    segments.discard(directory / segment_name(1))


def test_a_link_is_never_followed(directory: Path) -> None:
    outside = directory / "outside"
    outside.write_bytes(b"not ours")
    (directory / segment_name(2)).symlink_to(outside)
    touches: tuple[Callable[[], object], ...] = (
        lambda: segments.wipe(directory, 2, 0, 4),
        lambda: segments.discard(directory / segment_name(2)),
        lambda: SegmentWriter.adopt(directory, 2, 0),
    )
    for touch in touches:
        with pytest.raises(OSError, match="symbolic links"):
            touch()
    created = SegmentWriter.create(directory, 2)
    assert created.segment == 3
    created.close()
    assert outside.read_bytes() == b"not ours"
