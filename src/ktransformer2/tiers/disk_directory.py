"""The directory of the disk tier: what it must be, what lies in it, and the lock of whoever changes it.

    <number>.v<format>.kv            a segment: records, one behind the other
    index.<token>.v<format>.sqlite   where each record is; SQLite's own files beside it
    pins                             what does not make room for others
    lock                             held by the one process that writes, evicts and compacts just now

Knows names and sizes, no content. Files of other names are left alone, but count: the limit is the directory's.

Invariants: nothing is opened through a symbolic link; what is made is readable by its owner only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ktransformer2.errors import ConfigError
from ktransformer2.tiers.disk_pins import PINS_NAME
from ktransformer2.tiers.header import FORMAT_VERSION

LOCK_NAME = "lock"
_SEGMENT = re.compile(r"(\d{10})\.v(\d+)\.kv")
_INDEX = re.compile(r"index\.[0-9a-f]{8}\.v(\d+)\.sqlite(-wal|-shm|-journal)?")
_LOCK_POLL_S = 0.002
_STAT_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own blocks are
# There locks and shared memory do not hold between machines, and a server that is gone blocks for minutes.
_NETWORK = re.compile(
    r"(fuse\.)?(nfs4?|cifs|smb\w*|afpfs|afs|ceph|gfs2?|glusterfs|lustre|beegfs|gpfs|ncpfs|webdav|davfs2?"
    r"|sshfs|s3fs|rclone|gcsfuse|goofys|juicefs|mount-s3)"
)


@dataclass(frozen=True)
class SegmentFile:
    """Length of a segment, and what it takes on disk: less, where parts were given back."""

    num_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Survey:
    """What lies in the directory. `indexes`: main files of this format. `older`: files of formats before this one."""

    segments: dict[int, SegmentFile]
    indexes: list[str]
    index_files: list[str]
    older: list[str]
    disk_bytes: int


def segment_name(number: int) -> str:
    return f"{number:010d}.v{FORMAT_VERSION}.kv"


def index_name(token: str) -> str:
    return f"index.{token}.v{FORMAT_VERSION}.sqlite"


def prepare(directory: Path) -> None:
    """Make the directory where there is none, for its owner alone.

    Raises: ConfigError on a network's file system; OSError where it cannot be used, with the reason.
    """
    if kind := network_file_system(directory):
        raise ConfigError(
            f"the disk tier cannot lie in {directory}: that is a network file system ({kind}), where locks do not hold "
            "between machines; name a directory on a local disk, or use the remote tier"
        )
    if directory.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a symbolic link; name the directory it points to", directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}; name one of your own", directory)
        if stat.S_IMODE(found.st_mode) & 0o077:
            if any(not _is_ours(name) for name in os.listdir(descriptor)):
                raise PermissionError(
                    errno.EPERM, "it holds other files, and others may read it; name a directory of its own", directory
                )
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that a path lies on, or will lie on. None: it is a local one."""
    real, deepest, kind = Path(os.path.realpath(path)), -1, ""
    for mount in psutil.disk_partitions(all=True):
        where = Path(mount.mountpoint)
        if len(where.parts) >= deepest and (where == real or where in real.parents):
            deepest, kind = len(where.parts), mount.fstype.lower()  # a later mount at one place covers the earlier
    return kind if _NETWORK.fullmatch(kind) else None


def survey(directory: Path) -> Survey:
    """Look through the directory once. Raises: OSError where that cannot be done."""
    segments: dict[int, SegmentFile] = {}
    indexes, index_files, older = [], [], []
    disk_bytes = os.stat(directory).st_blocks * _STAT_BLOCK_BYTES
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # SQLite removes its own files when it likes
            taken = found.st_blocks * _STAT_BLOCK_BYTES
            disk_bytes += taken
            segment, index = _SEGMENT.fullmatch(entry.name), _INDEX.fullmatch(entry.name)
            version = int(segment[2]) if segment else int(index[1]) if index else FORMAT_VERSION
            if version > FORMAT_VERSION or not stat.S_ISREG(found.st_mode):
                continue
            if version < FORMAT_VERSION:
                older.append(entry.name)
            elif segment:
                segments[int(segment[1])] = SegmentFile(found.st_size, taken)
            elif index:
                index_files.append(entry.name)
                if index[2] is None:
                    indexes.append(entry.name)
    return Survey(segments, indexes, index_files, older, disk_bytes)


def _is_ours(name: str) -> bool:
    return name in (LOCK_NAME, PINS_NAME) or bool(_SEGMENT.fullmatch(name) or _INDEX.fullmatch(name))


@contextmanager
def locked(directory: Path, wait_s: float) -> Iterator[None]:
    """Be the one who changes the directory. Raises: TimeoutError after `wait_s`; OSError where no lock can be had."""
    descriptor = _acquire(directory / LOCK_NAME, time.monotonic() + wait_s)
    try:
        yield
    finally:
        # Let go by name: a copy of the descriptor in a forked child would hold the lock beyond the close.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _acquire(path: Path, deadline_s: float) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if try_lock(descriptor) and is_at(descriptor, path):
            return descriptor
        os.close(descriptor)
        if time.monotonic() >= deadline_s:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds it", path)
        time.sleep(_LOCK_POLL_S)


def try_lock(descriptor: int) -> bool:
    """Take the lock on an open file unless another has it.

    Raises: OSError where files cannot be locked; the descriptor is closed then.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        os.close(descriptor)
        raise
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name: it may have been deleted, or replaced."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)
