"""Looking at a directory: what lies there is told, and nothing there changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ktransformer2.errors import ConfigError
from ktransformer2.tiers.disk_listing import HeldBlock, look
from ktransformer2.tiers.disk_store import DiskLimits
from tests.tiers.disk_factories import Clock, Opener, chain, lineage, remove, segment_files

ROOMY = DiskLimits(64 * 2**20, ttl_s=10.0)
MODEL = lineage()
BLOCKS = chain("a", 4)


def state(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything that a change of a file would change."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns, file.read_bytes()) for file in directory.iterdir()}


def without_ages(blocks: list[HeldBlock]) -> list[HeldBlock]:
    return [dataclasses.replace(block, age_s=0.0) for block in blocks]


def test_a_directory_is_looked_at_while_a_process_writes_to_it(open_tier: Opener, tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, ROOMY, MODEL, clock)
    tier.put(BLOCKS[:2])
    assert look(tmp_path, clock()) == tier.entries()
    tier.put(BLOCKS)
    clock.now_s += 7.0
    found = look(tmp_path, clock())
    assert found == tier.entries()
    assert {block.key for block in found} == {block.key for block in BLOCKS}
    assert {block.age_s for block in found} == {7.0}
    tier.put(chain("b", 1))
    assert tier.stats().failures == {}


def test_looking_changes_nothing(open_tier: Opener, tmp_path: Path) -> None:
    """Neither what has outlived its time nor what is too much for a limit goes."""
    clock = Clock()
    tier = open_tier(tmp_path, ROOMY, MODEL, clock)
    tier.put(BLOCKS)
    tier.close()
    before = state(tmp_path)
    clock.now_s += 1000.0
    assert [block.age_s for block in look(tmp_path, clock())] == [1000.0] * 4
    assert state(tmp_path) == before


@pytest.mark.parametrize("index", ["lost", "broken"])
def test_without_an_index_the_headers_say_the_same(open_tier: Opener, tmp_path: Path, index: str) -> None:
    tier = open_tier(tmp_path, ROOMY, MODEL)
    tier.put(BLOCKS)
    remove(tier, [BLOCKS[3].key])
    expected = without_ages(tier.entries())
    tier.close()
    for file in tmp_path.glob("index*"):
        file.unlink() if index == "lost" else file.write_bytes(b"no index" * 700)
    before = state(tmp_path)
    found = without_ages(look(tmp_path, 0.0))
    assert sorted(found, key=lambda block: block.key) == sorted(expected, key=lambda block: block.key)
    assert len(found) == 3
    assert state(tmp_path) == before


def test_of_two_records_that_say_the_same_one_is_told_of(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, ROOMY, MODEL)
    tier.put(BLOCKS)
    tier.close()
    for file in tmp_path.glob("index*"):
        file.unlink()
    (segment,) = segment_files(tmp_path)
    (tmp_path / "0000000007.v1.kv").write_bytes(segment.read_bytes())
    assert len(look(tmp_path, 0.0)) == 4


def test_what_cannot_be_looked_at_is_an_error_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be looked at: No such file or directory"):
        look(tmp_path / "nowhere", 0.0)
