"""Files that are read from the disk and not from memory, and what reading them costs at best. Knows no tier."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ktransformer2.errors import ConfigError
from ktransformer2.models.store import cache_directory

_PIECE_BYTES = 2**20  # stays in the processor's own cache: a plain read is not slowed down by where it puts things
_SAMPLES = 64


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A directory on the disk where the disk tier lies by default, gone behind the `with`.

    Raises: ConfigError on a system that cannot be told to forget a file's pages.
    """
    if not hasattr(os, "posix_fadvise"):
        raise ConfigError(f"bench {name} drops pages with posix_fadvise, which {sys.platform} has not")
    with tempfile.TemporaryDirectory(prefix=f"bench-{name}-", dir=cache_directory()) as folder:
        yield Path(folder)


def drop_pages(directory: Path) -> None:
    """What lies in a directory is on the disk, and no longer in memory. Side effect: waits for the disk."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_share(paths: Sequence[Path]) -> float | None:
    """The share of sampled pages that can be read without waiting for the disk. None: the system does not say."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    here = total = 0
    for path in paths:
        descriptor, size = os.open(path, os.O_RDONLY), path.stat().st_size
        try:
            for sample in range(_SAMPLES):
                total += 1
                here += _is_resident(descriptor, size * sample // _SAMPLES)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return None
            raise
        finally:
            os.close(descriptor)
    return here / total if total else None


def _is_resident(descriptor: int, offset: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


def read_plainly(paths: Sequence[Path]) -> int:
    """Read files from beginning to end into one buffer; bytes read."""
    buffer = bytearray(_PIECE_BYTES)
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while num_bytes := os.readv(descriptor, [buffer]):
                total += num_bytes
        finally:
            os.close(descriptor)
    return total
