"""Texts that stay in a disk tier's directory whatever comes: a file of their last blocks, which hold up all before.

A pin is a wish of a person's, so it must outlive an index that is lost: it stands in a file of its own, a line a block,
`fingerprint layout key` in hexadecimal. It keeps a block from making room for others, not from its time to live.

Knows no record and no index. Written by whoever holds the directory's lock. A line that is none pins nothing.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PINS_NAME = "pins"
_LINE = re.compile(r"([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9a-f]{66})")
_PINNED_SHARE = 0.5  # of the directory's limit, so that there is always room for what is new


@dataclass(frozen=True)
class Pin:
    """One block: of which lineage, how it lies, its key."""

    fingerprint: bytes
    layout: bytes
    key: bytes


class Listed(Protocol):
    """What a list of the directory says of a block."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def layout(self) -> bytes: ...


def read_pins(directory: Path) -> set[Pin]:
    """Raises: OSError where there is a file and it cannot be read."""
    try:
        descriptor = os.open(directory / PINS_NAME, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return set()
    with open(descriptor, encoding="ascii", errors="replace") as file:
        lines = [_LINE.fullmatch(line.strip()) for line in file]
    return {Pin(*(bytes.fromhex(part) for part in line.groups())) for line in lines if line}


def write_pins(directory: Path, pins: Collection[Pin]) -> None:
    """In place of those before, whole or not at all. Raises: OSError."""
    path = directory / PINS_NAME
    if not pins:
        path.unlink(missing_ok=True)
        return
    new = path.with_name(f"{PINS_NAME}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.writelines(f"{pin.fingerprint.hex()} {pin.layout.hex()} {pin.key.hex()}\n" for pin in pins)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def pin_of(block: Listed) -> Pin:
    return Pin(block.fingerprint, block.layout, block.key)


def have_room(pins: Iterable[Pin], blocks: Iterable[Listed], limit_bytes: int) -> bool:
    """Whether all that these pins hold, of the `blocks` that lie there, leaves others their share of the limit."""
    lying = {pin_of(block): block for block in blocks}
    kept: set[Pin] = set()
    for pin in pins:
        while pin in lying and pin not in kept:
            kept.add(pin)
            pin = Pin(pin.fingerprint, pin.layout, lying[pin].parent)
    return sum(lying[pin].num_bytes for pin in kept) <= _PINNED_SHARE * limit_bytes
