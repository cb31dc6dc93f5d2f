"""`cache gc|clear|export|import` and `ls --disk`: what lies on disk, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.cli.guard import EXIT_USAGE
from ktransformer2.config import TierConfig
from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.opening import disk_limits
from ktransformer2.tiers.tier import Lineage, StoredBlock
from tests.cli.invoking import failed, invoke

LINEAGE = Lineage(b"f" * 32, (b"a" * 32, b"b" * 32), (8192, 4096))
NUM_BLOCKS = 20


def key(number: int, group: int = 0) -> bytes:
    return bytes([255 - number]) * 32 + bytes([group])  # a child's key sorts before its parent's


def open_tier(directory: Path) -> DiskTier:
    return DiskTier(directory, disk_limits(TierConfig()), LINEAGE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A chain in one layer group, and one block of a window in another."""
    tier = open_tier(tmp_path / "kv")
    chain = [
        StoredBlock(key(n), key(n - 1) if n else b"", 16, bytes([n]) * LINEAGE.payload_bytes[0])
        for n in range(NUM_BLOCKS)
    ]
    windowed = StoredBlock(key(3, 1), key(2, 1), 16, b"w" * LINEAGE.payload_bytes[1], holds_parent=False)
    assert tier.put([*chain, windowed]) == NUM_BLOCKS + 1
    tier.close()
    return tmp_path / "kv"


def found(*arguments: str | Path) -> Any:
    result = invoke("cache", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_ls_shows_what_lies_there(directory: Path) -> None:
    listed = found("ls", "--disk", "--directory", directory, "--limit", "5")
    assert (listed["num_blocks"], listed["num_models"], len(listed["blocks"])) == (NUM_BLOCKS + 1, 1, 5)
    text = invoke("cache", "ls", "--disk", "--directory", directory, "--limit", "5").stdout
    assert f"{NUM_BLOCKS + 1} blocks of 1 models" in text
    assert "More: --disk --start 5" in text


def test_ls_changes_nothing_and_works_beside_an_engine(directory: Path) -> None:
    tier = open_tier(directory)
    before = {file.name: file.stat().st_mtime_ns for file in directory.iterdir()}
    assert found("ls", "--disk", "--directory", directory)["num_blocks"] == NUM_BLOCKS + 1
    assert {file.name: file.stat().st_mtime_ns for file in directory.iterdir() if "-shm" not in file.name} == {
        name: time for name, time in before.items() if "-shm" not in name
    }
    tier.close()


def test_clear_deletes_all_of_it(directory: Path) -> None:
    held = sum(each.stat().st_size for each in directory.iterdir())
    assert found("clear", "--directory", directory)["freed_bytes"] > NUM_BLOCKS * 8192
    assert found("ls", "--disk", "--directory", directory)["num_blocks"] == 0
    assert sum(each.stat().st_size for each in directory.iterdir()) < held / 2
    assert b"\7" * 64 not in b"".join(each.read_bytes() for each in directory.iterdir())


def test_a_text_is_pinned_and_unpinned_by_the_id_of_its_last_block(directory: Path) -> None:
    def pinned() -> list[str]:
        listed = found("ls", "--disk", "--directory", directory)["blocks"]
        return [block["id"] for block in listed if block["pinned"]]

    last = key(NUM_BLOCKS - 1).hex()[:12]
    assert pinned() == []
    assert found("pin", last, "--directory", directory) == {"id": last}
    assert pinned() == [last]
    assert invoke("cache", "unpin", last, "--directory", directory).stdout == f"Unpinned {last}.\n"
    assert pinned() == []
    both = key(3).hex()[:12]
    found("pin", both, "--directory", directory)
    assert pinned() == [both, both], "one in each layer group"


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_an_id_that_names_no_block_is_told(directory: Path, tmp_path: Path, command: str) -> None:
    short = failed(invoke("cache", command, "ff", "--directory", directory), EXIT_USAGE)
    assert short == "error: 'ff' is too short for an id; write at least 6 digits of it"
    for name in ("0123456789ab", "zz" * 6):
        said = failed(invoke("cache", command, name, "--directory", directory), EXIT_USAGE)
        assert f"'{name}' names no block in {directory}; `ktransformer cache ls --disk` has their ids" in said
    nothing = failed(invoke("cache", command, "0123456789ab", "--directory", tmp_path / "none"), EXIT_USAGE)
    assert nothing == f"error: nothing was kept in {tmp_path / 'none'}"


def test_more_than_a_share_of_the_limit_cannot_be_pinned(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformer2.tiers.disk_pins._PINNED_SHARE", 1e-6)
    last = key(NUM_BLOCKS - 1).hex()[:12]
    said = failed(invoke("cache", "pin", last, "--directory", directory), EXIT_USAGE)
    assert f"{last} is not pinned: with it pins would hold more than half of the limit" in said
    assert not (directory / "pins").exists()


def test_gc_takes_files_of_older_formats(directory: Path) -> None:
    old = directory / "0000000001.v0.kv"
    old.write_bytes(b"x" * 100_000)
    assert found("gc", "--directory", directory)["freed_bytes"] >= 100_000
    assert not old.exists()
    assert found("ls", "--disk", "--directory", directory)["num_blocks"] == NUM_BLOCKS + 1


def test_what_is_exported_is_the_same_where_it_is_imported(directory: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "blocks.safetensors", tmp_path / "other"
    assert found("export", file, "--directory", directory)["num_blocks"] == NUM_BLOCKS + 1
    assert found("import", file, "--directory", other)["num_blocks"] == NUM_BLOCKS + 1
    here, there = open_tier(directory), open_tier(other)
    keys = [key(n) for n in range(NUM_BLOCKS)]
    assert there.get(keys) == here.get(keys) == [bytes([n]) * 8192 for n in range(NUM_BLOCKS)]
    assert there.get([key(3, 1)]) == [b"w" * 4096]
    here.close()
    there.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["blocks.safetensors", "kv", "other"]


def test_a_damaged_block_of_a_file_is_left_out(directory: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "blocks.safetensors", tmp_path / "other"
    found("export", file, "--directory", directory)
    content = bytearray(file.read_bytes())
    at = content.index(b"\5" * 8192)
    content[at] ^= 1
    file.write_bytes(content)
    assert found("import", file, "--directory", other)["num_blocks"] == 6, "five of the chain, and the other group"


@pytest.mark.parametrize("content", [b"", b"no such file", b"\x10" + bytes(7) + b'{"a":{"dtype":1}'])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "blocks.safetensors"
    file.write_bytes(content)
    result = invoke("cache", "import", file, "--directory", tmp_path / "other")
    assert "cannot be imported" in failed(result, EXIT_USAGE)
    assert not (tmp_path / "other").exists()


def test_nothing_kept_is_nothing_to_do(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert found("gc", "--directory", nowhere)["freed_bytes"] == 0
    assert found("clear", "--directory", nowhere)["freed_bytes"] == 0
    assert found("ls", "--disk", "--directory", nowhere)["num_blocks"] == 0
    assert "nothing was kept" in failed(invoke("cache", "export", tmp_path / "f", "--directory", nowhere), EXIT_USAGE)
    assert not nowhere.exists()


def test_deleting_says_so_when_it_could_not(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("ktransformer2.tiers.segments.discard", refuse)
    result = invoke("cache", "clear", "--directory", directory)
    assert result.exit_code == EXIT_USAGE
    assert "not everything could be done" in result.stderr
    assert "Deleted" not in result.stdout
