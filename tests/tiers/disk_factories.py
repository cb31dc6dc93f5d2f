"""Blocks, lineages and directories for the tests of what lasts: small payloads whose bytes follow from their key."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.tier import ROOT, Lineage, StoredBlock

Opener: TypeAlias = Callable[..., DiskTier]
PAYLOAD_BYTES = 10_000
RECORD_BYTES = 4 * 4096  # a page for its header, three for itself


class Clock:
    """Seconds since 1970, as a test wants them."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


def lineage(name: str = "model", payload_bytes: tuple[int, ...] = (PAYLOAD_BYTES,)) -> Lineage:
    """A lineage of that name, one layer group for each payload size."""
    layouts = tuple(digest(f"{name} layout {group} {size}") for group, size in enumerate(payload_bytes))
    return Lineage(digest(name), layouts, payload_bytes)


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def key_of(name: str, group: int = 0) -> bytes:
    return digest(name) + bytes([group])


def payload_of(key: bytes, num_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Bytes without order, always the same for a key."""
    return random.Random(key).randbytes(num_bytes)


def block(name: str, parent: str | None = None, *, group: int = 0, num_bytes: int = PAYLOAD_BYTES) -> StoredBlock:
    """The block of that name; `parent` names the one before it. Layer groups above 0 have a window."""
    key = key_of(name, group)
    before = key_of(parent, group) if parent is not None else ROOT
    return StoredBlock(key, before, 64, payload_of(key, num_bytes), holds_parent=group == 0)


def chain(name: str, length: int) -> list[StoredBlock]:
    """`length` blocks of one text: name0, name1 behind it, and so on."""
    return [block(f"{name}{i}", f"{name}{i - 1}" if i else None) for i in range(length)]


def remove(tier: DiskTier, keys: Sequence[bytes]) -> None:
    """Remove blocks, and what cannot be without them, as the tier does with damaged ones."""
    store = tier._store
    assert store is not None
    with store.changing():
        store.remove_all(list(store.index.find(tier._lineages(store.index), keys).values()))


def disk_bytes(directory: Path) -> int:
    """What a directory takes, its own entry and all files in it, as the system counts blocks."""
    return (os.stat(directory).st_blocks + sum(entry.stat().st_blocks for entry in os.scandir(directory))) * 512


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kv"))
