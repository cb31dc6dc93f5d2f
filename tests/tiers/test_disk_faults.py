"""What disks, users and other processes do to the directory: a miss and a counter, no wrong byte and no error."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits
from ktransformer2.tiers.tier import ROOT
from tests.tiers import killed_writers
from tests.tiers.disk_factories import (
    RECORD_BYTES,
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

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMY = DiskLimits(64 * 2**20)
MODEL = lineage()
CHAIN = [block.key for block in chain("a", 6)]


@pytest.fixture
def tier(open_tier: Opener, tmp_path: Path) -> DiskTier:
    opened = open_tier(tmp_path / "cache", ROOMY, MODEL)
    opened.put(chain("a", 6))
    return opened


def only_right_bytes(tier: DiskTier) -> int:
    """Ask for every block by itself and for the chain; how many came. Each must be right."""
    came = 0
    for key in CHAIN:
        if found := tier.get([key]):
            assert found == [payload_of(key)]
            came += 1
    found = tier.get(CHAIN)
    assert found == [payload_of(key) for key in CHAIN[: len(found)]]
    return came


def works_again(tier: DiskTier) -> bool:
    """Whether everything can be stored anew and read."""
    return tier.put(chain("a", 6)) == 6 and tier.get(CHAIN) == [payload_of(key) for key in CHAIN]


# Damaged files


def test_a_flipped_bit_is_a_miss_and_takes_what_continues_it_along(tier: DiskTier) -> None:
    flip(segment_files(tier.directory)[0], (2 * RECORD_BYTES + 5000) * 8)
    assert tier.get(CHAIN) == [payload_of(key) for key in CHAIN[:2]]
    assert tier.stats().failures == {"checksum": 1}
    assert {entry.key for entry in tier.entries()} == set(CHAIN[:2])
    assert works_again(tier)


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0] ^ 1 << bit % 8
        opened.seek(bit // 8)
        opened.write(bytes([byte]))


def test_a_thousand_flipped_bits_give_no_wrong_byte(open_tier: Opener, tmp_path: Path) -> None:
    chance = random.Random(7)
    tier = open_tier(tmp_path, dataclasses.replace(ROOMY, segment_bytes=3 * RECORD_BYTES), MODEL)
    tier.put(chain("a", 6))
    for round_ in range(250):
        files = segment_files(tmp_path)
        for _ in range(4):
            file = chance.choice(files)
            flip(file, chance.randrange(file.stat().st_size * 8))
        if round_ % 5 == 0:  # the next process, and now and then one that finds no index
            tier.close()
            if round_ % 10 == 0:
                for file in tmp_path.glob("index*"):
                    file.unlink()
            tier = open_tier(tmp_path, ROOMY, MODEL)
        only_right_bytes(tier)
        tier.put(chain("a", 6))
    assert tier.stats().failures.keys() <= {"checksum"}


def test_flipped_bits_in_the_index_give_no_wrong_byte(open_tier: Opener, tmp_path: Path) -> None:
    chance = random.Random(8)
    for _ in range(60):
        tier = open_tier(tmp_path, ROOMY, MODEL)
        tier.put(chain("a", 6))
        tier.close()
        (index,) = tmp_path.glob("index*.sqlite")
        for _ in range(8):
            flip(index, chance.randrange(index.stat().st_size * 8))
        tier = open_tier(tmp_path, ROOMY, MODEL)
        only_right_bytes(tier)
        tier.put(chain("a", 6))
        only_right_bytes(tier)
        tier.close()
    tier = open_tier(tmp_path, ROOMY, MODEL)
    tier.clear()
    assert works_again(tier)


@pytest.mark.parametrize("length", [0, 1, 4096, RECORD_BYTES, 3 * RECORD_BYTES + 4097, 6 * RECORD_BYTES - 1])
def test_a_cut_file_keeps_what_is_whole(tier: DiskTier, length: int) -> None:
    os.truncate(segment_files(tier.directory)[0], length)
    assert only_right_bytes(tier) <= length // RECORD_BYTES + 1
    assert works_again(tier)


def test_swapped_files_are_a_miss(open_tier: Opener, tmp_path: Path) -> None:
    limits = dataclasses.replace(ROOMY, segment_bytes=RECORD_BYTES)
    tier = open_tier(tmp_path, limits, MODEL)
    for one in chain("a", 6):
        tier.put([one])
    files = segment_files(tmp_path)
    assert len(files) == 6
    files[0].rename(tmp_path / "aside")
    files[3].rename(files[0])
    (tmp_path / "aside").rename(files[3])
    assert only_right_bytes(tier) <= 5
    assert tier.stats().failures.keys() == {"checksum"}
    assert works_again(tier)


def test_files_of_another_directory_are_what_they_say(open_tier: Opener, tmp_path: Path) -> None:
    other = open_tier(tmp_path / "other", ROOMY, lineage("other"))
    other.put(chain("a", 6))
    other.close()
    mine = open_tier(tmp_path / "mine", ROOMY, MODEL)
    mine.put(chain("a", 6))
    shutil.copy(segment_files(other.directory)[0], segment_files(mine.directory)[0])
    assert only_right_bytes(mine) == 0
    shutil.copy(segment_files(other.directory)[0], mine.directory / "0000000077.v1.kv")
    assert works_again(mine)


def test_files_that_are_no_segments(open_tier: Opener, tier: DiskTier) -> None:
    tier.close()
    (tier.directory / "0000000002.v1.kv").write_bytes(random.Random(1).randbytes(100_000))
    (tier.directory / "0000000003.v1.kv").symlink_to("/etc/passwd")
    (tier.directory / "0000000004.v1.kv").mkdir()
    os.mkfifo(tier.directory / "0000000005.v1.kv")
    (tier.directory / "index.00000000.v1.sqlite").symlink_to("/etc/passwd")
    again = open_tier(tier.directory, dataclasses.replace(ROOMY, segment_bytes=RECORD_BYTES), MODEL)
    assert only_right_bytes(again) == 6
    assert again.put([*chain("b", 1)]) == again.put([*chain("c", 1)]) == 1
    again.clear()
    assert Path("/etc/passwd").stat().st_size > 0
    assert again.stats().failures == {}


def test_an_older_index_is_squared_with_the_files(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, ROOMY, MODEL)
    tier.put(chain("a", 3))
    tier.close()
    (index,) = tmp_path.glob("index*.sqlite")
    older = index.read_bytes()
    tier = open_tier(tmp_path, ROOMY, MODEL)
    tier.put(chain("a", 6))
    tier.close()
    index.write_bytes(older)
    tier = open_tier(tmp_path, ROOMY, MODEL)
    assert only_right_bytes(tier) == 6


def test_an_index_that_contradicts_itself_is_built_anew(tier: DiskTier) -> None:
    (index,) = tier.directory.glob("index*.sqlite")
    with sqlite3.connect(index) as sql:
        sql.execute("DROP TABLE blocks")
    sql.close()
    assert tier.get(CHAIN) == []
    assert tier.stats().failures == {"index": 1}
    assert tier.get(CHAIN) == [payload_of(key) for key in CHAIN]


# Short of room, or of rights


def failing(code: int) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "write")])
def test_a_write_that_fails_is_counted_and_leaves_nothing_half(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    real = os.pwritev
    (segment,) = segment_files(tier.directory)

    def stops_short(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        if offset != 6 * RECORD_BYTES:
            raise OSError(code, os.strerror(code))
        return real(descriptor, [b"".join(pieces)[: RECORD_BYTES + 777]], offset)

    monkeypatch.setattr(os, "pwritev", stops_short)
    assert tier.put(chain("b", 3)) == 0
    assert tier.stats().failures == {kind: 1}
    assert segment.stat().st_size == 6 * RECORD_BYTES
    assert only_right_bytes(tier) == 6
    monkeypatch.undo()
    assert tier.put(chain("b", 3)) == 3
    assert {entry.key for entry in tier.entries()} == {*CHAIN, key_of("b0"), key_of("b1"), key_of("b2")}


def test_a_record_that_cannot_be_cut_off_is_never_followed_by_another(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
    monkeypatch.setattr(os, "ftruncate", failing(errno.EIO))
    assert tier.put(chain("b", 1)) == 0
    monkeypatch.undo()
    assert tier.put(chain("b", 1)) == 1
    assert only_right_bytes(tier) == 6


def test_an_index_that_cannot_be_written_undoes_the_records(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def fail(*_: object) -> NoReturn:
        raise full

    monkeypatch.setattr("ktransformer2.tiers.disk_index.DiskIndex.add", fail)
    assert tier.put(chain("b", 1)) == 0
    assert tier.stats().failures == {"full": 1}
    assert segment_files(tier.directory)[0].stat().st_size == 6 * RECORD_BYTES
    monkeypatch.undo()
    assert works_again(tier)


def test_a_read_that_fails_is_a_miss_and_nothing_is_removed(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    assert tier.get(CHAIN) == []
    assert tier.stats().failures.keys() == {"read"}
    monkeypatch.undo()
    assert tier.get(CHAIN) == [payload_of(key) for key in CHAIN]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB by itself; needs the right to mount one."""
    disk = tmp_path / "small"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", disk], capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_read_until_there_is_room(small_disk: Path, open_tier: Opener) -> None:
    tier = open_tier(small_disk, ROOMY, MODEL)
    tier.put(chain("a", 6))
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize))
    assert tier.put(chain("b", 3)) == 0
    assert tier.put(chain("b", 3)) == 0
    assert tier.stats().failures["full"] == 2
    assert only_right_bytes(tier) == 6
    remove(tier, CHAIN[5:])  # removing goes on too, though the index has no room to forget the row
    assert bytes(payload_of(CHAIN[5]))[:64] not in segment_files(small_disk)[0].read_bytes()
    ballast.unlink()
    assert tier.put(chain("b", 3)) == 3
    assert only_right_bytes(tier) == 5
    assert works_again(tier)


def test_a_disk_that_fills_up_by_itself(small_disk: Path, open_tier: Opener) -> None:
    tier = open_tier(small_disk, ROOMY, MODEL)
    stored = [key_of(f"t{i}.{j}") for i in range(40) for j in range(3) if tier.put(chain(f"t{i}.", j + 1)) == j + 1]
    assert 20 < len(stored) < 60
    assert tier.stats().failures.keys() == {"full"}
    assert [tier.get([key]) for key in stored] == [[payload_of(key)] for key in stored]
    tier.close()
    again = open_tier(small_disk, ROOMY, MODEL)
    assert [again.get([key]) for key in stored] == [[payload_of(key)] for key in stored]


def test_a_disk_that_becomes_read_only_is_read(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an I/O error on many systems. A disk with open files cannot be made so from outside."""
    real = os.open

    def read_only(path: str, flags: int, *mode: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    assert tier._store is not None
    tier._store.index._sql.execute("PRAGMA query_only=ON")
    assert tier.put(chain("b", 1)) == tier.clear() == 0
    assert only_right_bytes(tier) == 6
    assert tier.stats().failures.keys() == {"read_only"}


def test_a_read_only_disk_is_a_tier_that_is_off(small_disk: Path, open_tier: Opener) -> None:
    open_tier(small_disk, ROOMY, MODEL).close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    tier = open_tier(small_disk, ROOMY, MODEL)
    assert tier.off_reason is not None
    assert "Read-only file system" in tier.off_reason
    assert (tier.put(chain("a", 1)), tier.get(CHAIN)) == (0, [])
    assert tier.stats().failures == {"read_only": 1}


# Under its feet


def test_a_directory_that_is_deleted_is_a_miss_and_comes_back(tier: DiskTier) -> None:
    shutil.rmtree(tier.directory)
    assert tier.get(CHAIN) == []
    assert tier.stats().failures == {"gone": 1}
    assert not tier.directory.exists()
    assert works_again(tier)


def test_segments_that_are_deleted_are_a_miss(tier: DiskTier) -> None:
    segment_files(tier.directory)[0].unlink()
    assert tier.get(CHAIN) == []
    assert works_again(tier)


def test_another_process_that_holds_the_lock_costs_a_wait_and_no_more(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, dataclasses.replace(ROOMY, lock_wait_s=0.01), MODEL)
    tier.put(chain("a", 6))
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert tier.put(chain("b", 1)) == tier.clear() == 0
        assert only_right_bytes(tier) == 6
        opened_meanwhile = open_tier(tmp_path, dataclasses.replace(ROOMY, lock_wait_s=0.01), MODEL)
        assert opened_meanwhile.get(CHAIN) == []
    assert tier.stats().failures == {"busy": 2}
    assert opened_meanwhile.off_reason is None
    assert opened_meanwhile.put(chain("a", 6)) == 6
    assert opened_meanwhile.get(CHAIN) == [payload_of(key) for key in CHAIN]
    assert works_again(tier)


def test_a_record_that_is_moved_while_it_is_read_is_read_at_its_new_place(
    open_tier: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dataclasses.replace(ROOMY, segment_bytes=10 * RECORD_BYTES)
    reader, writer = (open_tier(tmp_path, limits, MODEL) for _ in range(2))
    writer.put([*(block(f"x{i}") for i in range(10)), block("a0")])
    writer.put([block("y")])  # another segment
    remove(writer, [key_of(f"x{i}") for i in range(10)])
    real = os.preadv
    moved: list[bool] = []

    def preadv(descriptor: int, pieces: list[bytearray], offset: int) -> int:
        if not moved:
            moved.append(True)
            writer.gc()
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert reader.get([key_of("a0")]) == [payload_of(key_of("a0"))]
    assert reader.stats().failures == {}


def test_threads_of_one_process_share_a_tier(tier: DiskTier) -> None:
    wrong: list[object] = []

    def reads() -> None:
        for _ in range(30):
            found = tier.get(CHAIN)
            if found != [payload_of(key) for key in CHAIN[: len(found)]]:
                wrong.append(found)

    def writes() -> None:
        for i in range(30):
            tier.put(chain(f"text{i}.", 3))
            remove(tier, [key_of(f"text{i}.1")])

    threads = [threading.Thread(target=work) for work in (reads, reads, writes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.stats().failures == {}
    assert only_right_bytes(tier) == 6


# Killed


def test_a_hundred_killed_writers_leave_no_wrong_byte(tmp_path: Path, open_tier: Opener) -> None:
    writers = subprocess.Popen(
        [sys.executable, "-m", "tests.tiers.killed_writers", str(tmp_path / "cache")],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert writers.stdin is not None
    assert writers.stdout is not None
    chance, found = random.Random(3), 0
    witness = open_tier(tmp_path / "cache", killed_writers.LIMITS, MODEL)  # works on beside them
    with writers:
        for round_ in range(100):
            writers.stdin.write(f"{round_} {chance.uniform(0.0, 0.03)}\n")
            writers.stdin.flush()
            witness.put(chain(f"{round_ % killed_writers.NUM_TEXTS}.", 2))
            beside = [block.key for block in chain(f"{round_ % 7}.", 3)]
            payloads = witness.get(beside)
            assert payloads == [payload_of(key) for key in beside[: len(payloads)]]
            assert writers.stdout.readline() == f"killed by {int(signal.SIGKILL)}\n"
            found += check_after_a_kill(tmp_path / "cache")
        writers.stdin.close()
    assert found > 1000
    assert witness.stats().stored_blocks > 0
    assert witness.stats().failures.keys() <= {"checksum", "gone"}  # gone: a segment was removed while it was read


def check_after_a_kill(directory: Path) -> int:
    """What the next process finds: only right bytes, no block without its parent, the limit kept; how many blocks."""
    tier, found = DiskTier(directory, killed_writers.LIMITS, MODEL), 0
    for text in range(killed_writers.NUM_TEXTS):
        keys = [block.key for block in chain(f"{text}.", 3)]
        payloads = tier.get(keys)
        assert payloads == [payload_of(key) for key in keys[: len(payloads)]]
        found += len(payloads)
    held = {entry.key: entry.parent for entry in tier.entries()}
    assert all(parent in held or parent == ROOT for parent in held.values())
    assert tier.stats().failures.keys() <= {"checksum"}
    assert disk_bytes(directory) <= killed_writers.LIMITS.limit_bytes
    tier.close()
    return found
