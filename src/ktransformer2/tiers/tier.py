"""What a place below the device is given and asked: one extent a block, under its key. Knows no block and no cache.

    put     from the writer's thread: blocks, parents first
    get     from the reader's thread: a chain, as far as it goes
    the rest from any thread; `may_hold` and `stats` without I/O

A tier that is slow, short, full, gone or corrupt is a miss, a counter and one log line: no method raises for what a
disk, a network or a foreign file does. What `get` returns was verified against its header, so it is the block that was
asked for, byte for byte.

Invariants: a block enters after its parent, and leaves before it (the tier is prefix-closed); nothing of another
`Lineage` is ever returned; the limit of bytes is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

KEY_BYTES = 33  # a prefix hash and the number of the layer group
ROOT = b""  # the parent of a first block
Clock = Callable[[], float]
Payload: TypeAlias = bytearray | memoryview


@dataclass(frozen=True)
class Lineage:
    """What all blocks of one cache have in common; blocks of another lineage are not readable here.

    `fingerprint` [32 bytes] decides what a key or value is: model, weights, numerics. `layouts` has one digest
    [32 bytes] for each layer group, over head sizes, layers, block tokens and forms: how a payload lies.
    `payload_bytes` has the extent's size for each layer group.
    """

    fingerprint: bytes
    layouts: tuple[bytes, ...]
    payload_bytes: tuple[int, ...]

    def fits(self, group: int, num_bytes: int) -> bool:
        """Whether a payload of that size can be one of that layer group."""
        return group < len(self.payload_bytes) and self.payload_bytes[group] == num_bytes


@dataclass(frozen=True)
class StoredBlock:
    """One full block on its way. `key` and `parent` [KEY_BYTES]; `parent` is ROOT where the chain begins.

    `holds_parent`: False in a layer group with a window, where a block may outlive the one before it.
    `payload`: the extent's bytes in the sealed form, the same on every machine. It is the receiver's to read only.
    """

    key: bytes
    parent: bytes
    num_tokens: int
    payload: bytes | bytearray | memoryview = field(repr=False)
    holds_parent: bool = True

    @property
    def group(self) -> int:
        return self.key[-1]


@dataclass(frozen=True)
class TierStats:
    """One snapshot: what is held now, and counts of blocks, bytes and events since the tier was opened.

    `limit_bytes` 0: none is known. `transfers` are I/O calls that carried payloads, `median_transfer_bytes` is their
    median size. `filter_saved` lookups ended at the filter; `filter_false` passed it in vain; `filter_missed` were
    denied and found by a later refresh of a shared tier's filter: written by others meanwhile. `failures` by what
    failed: write, read, checksum, full...
    """

    name: str
    held_blocks: int = 0
    held_bytes: int = 0
    limit_bytes: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    evicted_blocks: int = 0
    lookups: int = 0
    filter_saved: int = 0
    filter_false: int = 0
    filter_missed: int = 0
    transfers: int = 0
    median_transfer_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)


def lasting(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """Those that outlive the process; where there are none, all: what lies nowhere else counts as kept there."""
    return tuple(tier for tier in tiers if tier.lasts) or tuple(tiers)


class Tier(Protocol):
    """A place for blocks below the device."""

    name: str  # host, disk or remote: what figures and explanations call it
    lasts: bool  # longer than the process

    def may_hold(self, key: bytes) -> bool:
        """False: surely not, of what this process wrote or read. True: worth a `get`. No I/O."""

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        """Keep blocks, as one transfer where that can be; how many are held now. One without its parent is left out."""

    def get(self, keys: Sequence[bytes]) -> Sequence[Payload]:
        """The payloads of the leading `keys`, in order, up to the first that is missing or broken; a use of each.

        They are the caller's own, to write to as well.
        """

    def stats(self) -> TierStats:
        """The figures now."""

    def close(self) -> None:
        """Let go of files and connections; a lasting place keeps what was put. A second call does nothing."""
