"""What stands before a payload wherever one lies outside this process: whose it is, and how to know that it is whole.

    offset  bytes  little-endian
         0      8  magic "KT2BLOCK"
         8      2  format version
        10      1  flags: 1 holds its parent, 2 has a parent
        11      1  layer group
        12      4  tokens
        16      8  payload bytes
        24      8  time of writing, seconds since 1970; only the time to live reads it
        32     32  fingerprint of the lineage
        64     32  digest of the payload's layout
        96     33  key
       129     33  parent; zeros without one
       162     16  xxh3_128 of the payload
       178      6  zeros
       184      8  xxh3_64 of the 184 bytes before

Knows bytes only, neither files nor servers. A checksum tells damage, not intent: where others can write, a payload
carries a signature beside it. The only file that knows how checksums are made.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from ktransformer2.tiers.tier import KEY_BYTES, ROOT, Lineage, StoredBlock

MAGIC = b"KT2BLOCK"
FORMAT_VERSION = 1
HEADER_BYTES = 192
_FIELDS = struct.Struct(f"<8sHBBIQQ32s32s{KEY_BYTES}s{KEY_BYTES}s16s6x")
_HOLDS_PARENT, _HAS_PARENT = 1, 2
_NO_PARENT = bytes(KEY_BYTES)
Bytes: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class BlockHeader:
    """One payload's header, every field checked against the header's own checksum, none yet against the payload."""

    fingerprint: bytes
    layout: bytes
    key: bytes
    parent: bytes
    holds_parent: bool
    num_tokens: int
    payload_bytes: int
    checksum: bytes
    written_s: int

    @classmethod
    def describe(cls, block: StoredBlock, lineage: Lineage, now_s: float) -> BlockHeader:
        """The header of a block of that lineage; reads the payload once, for its checksum."""
        num_bytes = memoryview(block.payload).nbytes
        assert lineage.fits(block.group, num_bytes), f"{num_bytes} bytes in layer group {block.group} of {lineage}"
        return cls(
            fingerprint=lineage.fingerprint,
            layout=lineage.layouts[block.group],
            key=block.key,
            parent=block.parent,
            holds_parent=block.holds_parent,
            num_tokens=block.num_tokens,
            payload_bytes=num_bytes,
            checksum=checksum(block.payload),
            written_s=max(0, int(now_s)),
        )

    @property
    def group(self) -> int:
        return self.key[-1]

    def pack(self) -> bytes:
        """The header as HEADER_BYTES bytes."""
        flags = _HOLDS_PARENT * self.holds_parent | _HAS_PARENT * (self.parent != ROOT)
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            flags,
            self.group,
            self.num_tokens,
            self.payload_bytes,
            self.written_s,
            self.fingerprint,
            self.layout,
            self.key,
            self.parent or _NO_PARENT,
            self.checksum,
        )
        return fields + xxhash.xxh3_64_digest(fields)

    @classmethod
    def unpack(cls, found: Bytes) -> BlockHeader | None:
        """The header at the start of `found`. None: none of this format is there, or not a whole one."""
        view = memoryview(found)
        if view.nbytes < HEADER_BYTES or view[: len(MAGIC)] != MAGIC:
            return None
        fields = view[: _FIELDS.size]
        if view[_FIELDS.size : HEADER_BYTES] != xxhash.xxh3_64_digest(fields):
            return None
        _, version, flags, group, tokens, size, written_s, fingerprint, layout, key, parent, digest = _FIELDS.unpack(
            fields
        )
        if version != FORMAT_VERSION or group != key[-1]:
            return None
        return cls(
            fingerprint=fingerprint,
            layout=layout,
            key=key,
            parent=parent if flags & _HAS_PARENT else ROOT,
            holds_parent=bool(flags & _HOLDS_PARENT),
            num_tokens=tokens,
            payload_bytes=size,
            checksum=digest,
            written_s=written_s,
        )

    def is_of(self, lineage: Lineage, key: bytes) -> bool:
        """Whether it announces the block `key` of that lineage, as large as its layer group's payloads are."""
        return (
            self.key == key
            and self.fingerprint == lineage.fingerprint
            and lineage.fits(self.group, self.payload_bytes)
            and self.layout == lineage.layouts[self.group]
        )

    def vouches_for(self, payload: Bytes) -> bool:
        """Whether that is the payload it was made for, byte for byte. Reads all of it."""
        return memoryview(payload).nbytes == self.payload_bytes and checksum(payload) == self.checksum


def checksum(payload: Bytes) -> bytes:
    """xxh3_128 of a payload, 16 bytes."""
    return xxhash.xxh3_128_digest(payload)


assert _FIELDS.size + 8 == HEADER_BYTES, f"the fields take {_FIELDS.size} bytes"
