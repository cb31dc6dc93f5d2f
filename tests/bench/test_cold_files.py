"""Reading from the disk: every byte once, and nothing of it from memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformer2.bench.cold_files import drop_pages, read_plainly, resident_share, scratch


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path))
    return tmp_path


def test_a_plain_read_reads_every_byte(tmp_path: Path) -> None:
    sizes = (3 * 2**20 + 17, 5, 0)
    paths = [tmp_path / str(size) for size in sizes]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(bytes(size))
    drop_pages(tmp_path)
    assert read_plainly(paths) == sum(sizes)


def test_pages_that_were_dropped_are_not_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * 2**20))
    assert read_plainly([path]) == 8 * 2**20
    before = resident_share([path])
    drop_pages(tmp_path)
    after = resident_share([path])
    if before is None or after is None or after == before:
        return  # this file system keeps its files in memory, or does not say; the bench then prints what it found
    assert before > 0.9
    assert after < 0.5


def test_a_scratch_lies_where_blocks_lie_and_goes(cache: Path) -> None:
    with scratch("tiers") as folder:
        assert folder.parent == cache
        (folder / "file").write_bytes(b"x")
    assert list(cache.iterdir()) == []
