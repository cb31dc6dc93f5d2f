"""The disk tier when nothing goes wrong: what lasts, what leaves first, what a limit means, what is deleted."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from pathlib import Path

import pytest

from ktransformer2.errors import ConfigError
from ktransformer2.tiers import disk_directory
from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits
from ktransformer2.tiers.tier import ROOT, Tier
from tests.tiers.disk_factories import (
    PAYLOAD_BYTES,
    RECORD_BYTES,
    Clock,
    Opener,
    block,
    chain,
    disk_bytes,
    key_of,
    lineage,
    payload_of,
    remove,
    segment_files,
)

ROOMY = DiskLimits(64 * 2**20)
MODEL = lineage()


@pytest.fixture
def tier(open_tier: Opener, tmp_path: Path) -> DiskTier:
    return open_tier(tmp_path / "cache", ROOMY, MODEL)


def keys(*names: str) -> list[bytes]:
    return [key_of(name) for name in names]


def held(tier: DiskTier) -> set[bytes]:
    return {entry.key for entry in tier.entries()}


def test_it_is_a_tier(tier: DiskTier) -> None:
    as_tier: Tier = tier
    assert as_tier.name == "disk"


def test_what_was_put_comes_back_byte_for_byte(tier: DiskTier) -> None:
    blocks = chain("a", 5)
    assert tier.put(blocks) == 5
    assert tier.get([b.key for b in blocks]) == [b.payload for b in blocks]


def test_a_chain_ends_at_the_first_block_that_is_missing(tier: DiskTier) -> None:
    tier.put(chain("a", 3))
    assert tier.get(keys("a0", "a1", "b", "a2")) == [payload_of(key) for key in keys("a0", "a1")]
    assert tier.get(keys("b", "a0")) == []
    assert tier.get([]) == []


def test_a_batch_is_one_transfer_and_a_chain_is_read_in_one(tier: DiskTier) -> None:
    tier.put(chain("a", 5))
    assert (tier.stats().transfers, tier.stats().median_transfer_bytes) == (1, 5 * PAYLOAD_BYTES)
    tier.get(keys("a0", "a1", "a2", "a3", "a4"))
    assert (tier.stats().transfers, tier.stats().median_transfer_bytes) == (2, 5 * PAYLOAD_BYTES)
    tier.get(keys("a1", "a3"))
    assert tier.stats().transfers == 4  # they do not lie side by side


def test_a_block_without_its_parent_is_left_out(tier: DiskTier) -> None:
    assert tier.put([block("a1", "a0"), block("a2", "a1"), block("b0")]) == 1
    assert held(tier) == set(keys("b0"))
    assert tier.put([block("b1", "b0")]) == 1


def test_a_block_behind_a_window_needs_no_parent(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, ROOMY, lineage(payload_bytes=(PAYLOAD_BYTES, 500)))
    alone = block("a7", "a6", group=1, num_bytes=500)
    assert tier.put([alone]) == 1
    assert tier.get([alone.key]) == [alone.payload]


def test_where_blocks_go_is_logged_at_the_first_write(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ktransformer2.tiers"):
        tier.put([block("orphan", "nowhere")])
        assert caplog.messages == []
        tier.put(chain("a", 2))
        tier.put(chain("b", 2))
    (line,) = caplog.messages
    assert re.fullmatch(rf"blocks are kept in {tier.directory}: \d+ of at most {tier.limits.limit_bytes} bytes", line)


def test_a_block_is_written_once(tier: DiskTier) -> None:
    assert tier.put(chain("a", 3)) == 3
    assert tier.put([*chain("a", 4), *chain("a", 2)]) == 4
    assert (tier.stats().stored_blocks, tier.stats().stored_bytes) == (4, 4 * PAYLOAD_BYTES)


def test_it_is_all_there_in_the_next_process(open_tier: Opener, tmp_path: Path) -> None:
    first = open_tier(tmp_path, ROOMY, MODEL)
    first.put(chain("a", 3))
    first.close()
    first.close()
    assert (first.put(chain("b", 1)), first.get(keys("a0")), first.may_hold(key_of("b0"))) == (0, [], False)
    second = open_tier(tmp_path, ROOMY, MODEL)
    assert all(second.may_hold(key) for key in keys("a0", "a1", "a2"))
    assert second.get(keys("a0", "a1", "a2")) == [payload_of(key) for key in keys("a0", "a1", "a2")]
    second.put(chain("b", 1))
    assert len(segment_files(tmp_path)) == 1  # it goes on where the first has left off


def test_a_lost_index_is_built_anew_from_the_segments(open_tier: Opener, tmp_path: Path) -> None:
    first = open_tier(tmp_path, ROOMY, MODEL)
    first.put(chain("a", 3))
    remove(first, keys("a2"))
    first.close()
    for file in tmp_path.glob("index*"):
        file.unlink()
    second = open_tier(tmp_path, ROOMY, MODEL)
    assert held(second) == set(keys("a0", "a1"))
    assert second.get(keys("a0", "a1")) == [payload_of(key) for key in keys("a0", "a1")]
    assert second.put([block("a2", "a1")]) == 1


def test_another_lineage_sees_nothing_and_counts_for_the_limit(open_tier: Opener, tmp_path: Path) -> None:
    tier, other = (open_tier(tmp_path, ROOMY, lineage(name)) for name in ("model", "other"))
    tier.put(chain("a", 3))
    assert other.get(keys("a0")) == []
    assert not other.may_hold(key_of("a0"))
    other.put(chain("a", 1))
    assert {(entry.fingerprint, entry.key) for entry in tier.entries()} == {
        (lineage("other").fingerprint, key_of("a0")),
        *((MODEL.fingerprint, key) for key in keys("a0", "a1", "a2")),
    }
    assert other.stats().held_blocks == 4


def test_two_processes_share_a_directory_and_add_to_segments_of_their_own(open_tier: Opener, tmp_path: Path) -> None:
    limits = dataclasses.replace(ROOMY, filter_refresh_s=0.0)
    one, two = open_tier(tmp_path, limits, MODEL), open_tier(tmp_path, limits, MODEL)
    one.put(chain("a", 2))
    assert not two.may_hold(key_of("a0"))  # its filter was made before
    two.put(chain("b", 2))
    assert len(segment_files(tmp_path)) == 2
    assert two.may_hold(key_of("a0"))
    assert two.stats().filter_missed == 1
    assert one.get(keys("b0", "b1")) == [payload_of(key) for key in keys("b0", "b1")]
    assert one.put(chain("b", 3)) == 3
    assert one.stats().stored_blocks == 3  # two are there already


def test_the_filter_is_not_looked_after_in_every_call(open_tier: Opener, tmp_path: Path) -> None:
    limits = dataclasses.replace(ROOMY, filter_refresh_s=3600.0)
    one, two = open_tier(tmp_path, limits, MODEL), open_tier(tmp_path, limits, MODEL)
    one.put(chain("a", 1))
    two.refresh()
    assert not two.may_hold(key_of("a0"))
    two.limits = dataclasses.replace(limits, filter_refresh_s=0.0)
    two._next_refresh_s = 0.0
    two.refresh()
    assert two.may_hold(key_of("a0"))
    assert two.stats().filter_missed == 1


def test_a_scan_that_breaks_off_leaves_the_filter_as_it_was(
    open_tier: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, dataclasses.replace(ROOMY, filter_refresh_s=0.0), MODEL)
    tier.put(chain("a", 1))

    def refuse(*_: object) -> list[bytes]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("ktransformer2.tiers.disk_index.DiskIndex.keys", refuse)
    tier.refresh()
    assert tier.may_hold(key_of("a0"))
    monkeypatch.undo()
    tier.refresh()
    assert tier.may_hold(key_of("a0"))


# The limit


def limits_for(records: int) -> DiskLimits:
    """A limit for about so many records beside the index."""
    return dataclasses.replace(ROOMY, limit_bytes=records * RECORD_BYTES + 360_000)


def test_the_directory_keeps_to_its_limit_after_every_put(open_tier: Opener, tmp_path: Path) -> None:
    limits = limits_for(40)
    tier = open_tier(tmp_path, limits, MODEL)
    for i in range(40):
        assert tier.put(chain(f"text{i}.", 5)) == 5
        assert disk_bytes(tmp_path) <= limits.limit_bytes
    stats = tier.stats()
    assert stats.held_bytes == disk_bytes(tmp_path)
    assert stats.stored_blocks == 200
    assert stats.evicted_blocks == 200 - stats.held_blocks
    assert stats.held_blocks >= 30


def test_what_was_used_longest_ago_leaves_first_and_leaves_before_roots(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, ROOMY, MODEL)
    for name in "abc":
        tier.put(chain(name, 3))
    tier.get(keys("a0", "a1"))
    tier.gc()  # tells the index of it
    store, order = tier._store, []
    assert store is not None
    while rest := held(tier):
        with store.changing():
            store._evict(1, ())
        order += sorted(rest - held(tier))
    assert order == keys("a2", "b2", "b1", "b0", "c2", "c1", "c0", "a1", "a0")


def test_room_is_never_made_by_the_parents_of_what_comes(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, limits_for(8), MODEL)
    blocks = chain("a", 30)
    for b in blocks:
        tier.put([b])
    count = len(held(tier))
    assert 0 < count < 30
    assert held(tier) == {b.key for b in blocks[:count]}  # the head of the chain; nothing is rootless
    assert tier.put(blocks) == count


def test_a_lower_limit_holds_from_the_start(open_tier: Opener, tmp_path: Path) -> None:
    open_tier(tmp_path, ROOMY, MODEL).put(chain("a", 60))
    tier = open_tier(tmp_path, limits_for(10), MODEL)
    assert disk_bytes(tmp_path) <= limits_for(10).limit_bytes
    names = [f"a{i}" for i in range(60)]
    assert held(tier) == set(keys(*names[: len(held(tier))]))


def test_foreign_files_count_and_stay(open_tier: Opener, tmp_path: Path) -> None:
    limits = limits_for(20)
    tier = open_tier(tmp_path, limits, MODEL)
    tier.put(chain("a", 15))
    before = len(held(tier))
    (tmp_path / "notes.txt").write_bytes(bytes(25 * RECORD_BYTES))
    tier.put(chain("b", 2))
    assert disk_bytes(tmp_path) <= limits.limit_bytes
    assert len(held(tier)) < before
    assert (tmp_path / "notes.txt").exists()


# Deleting


def lies_in_files(directory: Path, payload: bytes) -> bool:
    return any(payload[:64] in file.read_bytes() for file in directory.iterdir())


def test_removed_bytes_are_gone_when_the_call_returns(tier: DiskTier) -> None:
    blocks = chain("a", 3)
    tier.put([*blocks, *chain("b", 1)])
    (segment,) = segment_files(tier.directory)
    before = segment.stat().st_blocks
    remove(tier, keys("a1", "never"))  # a2 continues it
    assert not lies_in_files(tier.directory, bytes(blocks[1].payload))
    assert not lies_in_files(tier.directory, bytes(blocks[2].payload))
    assert before - segment.stat().st_blocks == 2 * RECORD_BYTES // 512
    assert held(tier) == set(keys("a0", "b0"))
    assert tier.get(keys("a0", "a1")) == [blocks[0].payload]
    remove(tier, keys("a0", "b0"))
    assert segment_files(tier.directory) == []


def test_where_no_hole_can_be_left_zeros_are_written_and_compaction_gives_the_room_back(
    open_tier: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktransformer2.tiers.segments._fallocate", lambda: None)
    limits = dataclasses.replace(limits_for(40), segment_bytes=8 * RECORD_BYTES)
    tier = open_tier(tmp_path, limits, MODEL)
    first = chain("first", 1)
    tier.put([*first, *chain("x", 4)])
    remove(tier, [first[0].key])
    assert not lies_in_files(tmp_path, bytes(first[0].payload))
    for i in range(40):
        assert tier.put(chain(f"text{i}.", 5)) == 5
        assert disk_bytes(tmp_path) <= limits.limit_bytes
    assert tier.stats().held_blocks >= 20
    rows = sorted(held(tier))
    assert [tier.get([key]) for key in rows] == [[payload_of(key)] for key in rows]


def test_clear_forgets_every_lineage_and_says_how_much(open_tier: Opener, tmp_path: Path) -> None:
    tier, other = (open_tier(tmp_path, ROOMY, lineage(name)) for name in ("model", "other"))
    tier.put(chain("a", 3))
    other.put(chain("b", 3))
    (tmp_path / "0000000001.v0.kv").write_bytes(b"older")
    assert tier.clear() >= 6 * RECORD_BYTES
    assert segment_files(tmp_path) == []
    assert tier.entries() == other.entries() == []
    assert other.get(keys("b0")) == []
    assert not tier.may_hold(key_of("a0"))
    assert other.put(chain("b", 1)) == 1


# Time


def test_what_nobody_uses_is_gone_after_its_time(open_tier: Opener, tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, dataclasses.replace(ROOMY, ttl_s=100.0), MODEL, clock)
    tier.put(chain("a", 3))
    tier.put(chain("b", 1))
    clock.now_s += 60
    tier.get(keys("a0", "a1"))  # renews both
    clock.now_s += 60
    assert tier.get(keys("b0")) == []
    assert tier.get(keys("a0", "a1", "a2")) == [payload_of(key) for key in keys("a0", "a1")]
    assert tier.gc() >= 2 * RECORD_BYTES
    assert held(tier) == set(keys("a0", "a1"))
    assert {round(entry.age_s) for entry in tier.entries()} == {0}


def test_a_parent_stays_while_its_child_is_in_use(open_tier: Opener, tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, dataclasses.replace(ROOMY, ttl_s=100.0), MODEL, clock)
    tier.put(chain("a", 2))
    clock.now_s += 60
    tier.get(keys("a1"))
    clock.now_s += 60
    tier.gc()
    assert tier.get(keys("a0", "a1")) == [payload_of(key) for key in keys("a0", "a1")]


def test_a_clock_that_jumps_costs_at_most_a_miss(open_tier: Opener, tmp_path: Path) -> None:
    clock = Clock()
    limits = dataclasses.replace(ROOMY, ttl_s=100.0)
    tier = open_tier(tmp_path, limits, MODEL, clock)
    tier.put(chain("a", 1))
    clock.now_s -= 1e9
    assert tier.get(keys("a0")) == [payload_of(key_of("a0"))]
    assert tier.entries()[0].age_s == 0
    tier.put(chain("b", 1))
    tier.gc()
    clock.now_s += 150
    tier.gc()
    assert held(tier) == set()  # what was written in the future counts from when the clock was set back
    clock.now_s = -5.0
    assert tier.put(chain("c", 1)) == 1
    clock.now_s = float(2**40)
    assert tier.get(keys("c0")) == []
    assert tier.put(chain("d", 1)) == 1


def test_gc_removes_older_formats_and_what_other_lineages_left(open_tier: Opener, tmp_path: Path) -> None:
    clock = Clock()
    limits = dataclasses.replace(ROOMY, ttl_s=100.0)
    open_tier(tmp_path, limits, lineage("other"), clock).put(chain("a", 2))
    for name in ("0000000009.v0.kv", "index.0123abcd.v0.sqlite", "0000000009.v2.kv"):
        (tmp_path / name).write_bytes(bytes(5000))
    clock.now_s += 150
    tier = open_tier(tmp_path, limits, MODEL, clock)
    tier.put(chain("b", 1))
    tier.gc()
    assert held(tier) == set(keys("b0"))
    assert sorted(path.name for path in tmp_path.iterdir() if ".v0." in path.name) == []
    assert (tmp_path / "0000000009.v2.kv").exists()  # a newer format is not ours to judge


def test_gc_brings_together_what_is_mostly_holes(open_tier: Opener, tmp_path: Path) -> None:
    limits = dataclasses.replace(ROOMY, segment_bytes=20 * RECORD_BYTES)
    tier = open_tier(tmp_path, limits, MODEL)
    for i in range(4):
        tier.put([block(f"s{i}.{j}") for j in range(20)])
    assert len(segment_files(tmp_path)) == 4
    remove(tier, [key_of(f"s{i}.{j}") for i in range(4) for j in range(20) if j % 10])
    tier.gc()
    left = keys(*(f"s{i}.{j}" for i in range(4) for j in (0, 10)))
    assert held(tier) == set(left)
    assert len(segment_files(tmp_path)) <= 2
    assert tier.get(left) == [payload_of(key) for key in left]


# The directory


def test_only_its_owner_may_read_it(open_tier: Opener, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    tier = open_tier(tmp_path / "cache", ROOMY, MODEL)
    tier.put(chain("a", 1))
    assert stat.S_IMODE(os.stat(tier.directory).st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in tier.directory.iterdir()} == {0o600}


def test_a_network_file_system_is_refused_with_a_reason(
    open_tier: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [mount("/", "ext4"), mount(str(tmp_path), "fuse.sshfs"), mount(str(tmp_path / "x" / "local"), "xfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    with pytest.raises(ConfigError, match=r"network file system \(fuse.sshfs\).*local disk"):
        open_tier(tmp_path / "x" / "y", ROOMY, MODEL)
    assert not (tmp_path / "x").exists()
    assert disk_directory.network_file_system(tmp_path / "x" / "local" / "y") is None


@dataclasses.dataclass(frozen=True)
class Mount:
    mountpoint: str
    fstype: str


def mount(where: str, kind: str) -> Mount:
    return Mount(where, kind)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.s3fs", "fuse.rclone", "lustre"])
def test_network_types(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [mount("/", kind)])
    assert disk_directory.network_file_system(Path("/nowhere")) == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "apfs", "fuse.ntfs-3g"])
def test_local_types(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [mount("/", kind)])
    assert disk_directory.network_file_system(Path("/nowhere")) is None


def test_a_directory_that_is_a_link_a_file_or_open_to_others_is_a_tier_that_is_off(
    open_tier: Opener, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "thesis.txt").write_text("years of work")
    for name, reason in (("link", "symbolic link"), ("file", "exists"), ("shared", "others may read it")):
        tier = open_tier(tmp_path / name, ROOMY, MODEL)
        assert tier.off_reason is not None
        assert reason in tier.off_reason, tier.off_reason
        assert (tier.put(chain("a", 1)), tier.get(keys("a0")), tier.clear(), tier.gc()) == (0, [], 0, 0)
        assert sum(tier.stats().failures.values()) == 1
    assert list((tmp_path / "real").iterdir()) == []
    assert (tmp_path / "shared" / "thesis.txt").exists()


def test_entries_say_what_is_needed_to_take_blocks_elsewhere(tier: DiskTier) -> None:
    tier.put(chain("a", 2))
    second, first = sorted(tier.entries(), key=lambda entry: entry.parent, reverse=True)
    assert (first.key, first.parent, first.num_tokens, first.num_bytes) == (key_of("a0"), ROOT, 64, PAYLOAD_BYTES)
    assert (second.key, second.parent, second.holds_parent) == (key_of("a1"), key_of("a0"), True)
    assert (second.fingerprint, second.layout) == (MODEL.fingerprint, MODEL.layouts[0])
