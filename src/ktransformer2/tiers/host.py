"""The second level in memory: blocks that left the device, in memory of their own with its own limit of bytes.

Payloads lie as they are handed over, in their sealed form. On a machine without another device this is worth its room
only where the sealed form is denser than what the device holds; which form that is, is decided where precision is.
Nothing lasts here and nobody else writes here, so there is no header and no checksum: a payload is whole because `put`
has returned.

Room is made by letting leaves go, the one whose last use is longest ago first. `get` and `put` are uses of all blocks
they name, of the parents too; what the same call has brought is never its victim.

Knows no disk, no server and no device. Any thread: one lock over everything but `may_hold`, which reads one dict.

Invariants: committed <= limit; a held block's parent is held, unless the block says that it can do without; the arena's
extents are exactly those of held blocks.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ktransformer2.config import CacheConfig
from ktransformer2.layout import EXTENT_ALIGNMENT, round_up
from ktransformer2.memory import Arena, GrowthPolicy, SlabPool
from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.tier import ROOT, Lineage, StoredBlock, TierStats

_GROWTH = CacheConfig()
_HEAP_SLACK = 64


@dataclass
class _Held:
    """Where a block lies, and how many held blocks cannot do without it."""

    parent: bytes
    holds_parent: bool
    address: int
    num_bytes: int
    used: int = 0
    dependants: int = 0


class HostTier:
    """Blocks of one lineage in at most `limit_bytes` of memory. See `Tier` for what the calls promise."""

    name = "host"
    lasts = False

    def __init__(self, lineage: Lineage, limit_bytes: int) -> None:
        """Raises: ConfigError for a limit below one page; OutOfMemoryError where the system has no addresses left."""
        self._lineage, self._limit_bytes = lineage, limit_bytes
        self._lock = threading.Lock()
        self._tally = Tally(self.name)
        self._held: dict[bytes, _Held] = {}
        self._leaves: list[tuple[int, bytes]] = []  # heap of (last use, key); what is no longer true is skipped
        self._calls = 0
        self._held_bytes = self._stored_bytes = 0
        self._closed = False
        self._arena = Arena(limit_bytes)
        # A pool grows by chunks of tokens; an extent as large as a chunk makes it grow by one extent, or 1/128 of all.
        growth, tokens = GrowthPolicy(_GROWTH), _GROWTH.min_chunk_tokens
        sizes = sorted({round_up(size, EXTENT_ALIGNMENT) for size in lineage.payload_bytes})
        self._pools = {size: SlabPool(self._arena, size, tokens, growth) for size in sizes}

    def may_hold(self, key: bytes) -> bool:
        """Exact here."""
        held = key in self._held
        self._tally.count(lookups=1, filter_saved=not held)
        return held

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        with self._lock:
            self._calls += 1
            before = self._stored_bytes
            held = sum(self._put(block) for block in blocks)
            self._prune()
            if self._stored_bytes > before:
                self._tally.transfer(self._stored_bytes - before)
            return held

    def get(self, keys: Sequence[bytes]) -> list[bytearray]:
        """Each payload is a copy."""
        found: list[bytearray] = []
        with self._lock:
            self._calls += 1
            for key in keys:
                held = self._held.get(key)
                if held is None:
                    break
                self._use(key, held)
                found.append(bytearray(_view(held)))
            self._prune()
        if found:
            size = sum(map(len, found))
            self._tally.count(loaded_blocks=len(found), loaded_bytes=size)
            self._tally.transfer(size)
        return found

    def stats(self) -> TierStats:
        return self._tally.stats(len(self._held), self._held_bytes, self._limit_bytes)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._held.clear()
                self._held_bytes = 0
                self._arena.close()
                self._closed = True

    def check_integrity(self) -> None:
        """Recounts blocks, bytes, dependants and leaves."""
        with self._lock:
            sizes = [held.num_bytes for held in self._held.values()]
            assert sum(sizes) == self._held_bytes, f"{sum(sizes)} != {self._held_bytes} bytes"
            used = sum(pool.num_used for pool in self._pools.values())
            assert used == len(self._held), f"{used} extents for {len(self._held)} blocks"
            committed = self._arena.stats.committed_bytes
            assert committed <= self._limit_bytes, f"{committed} of {self._limit_bytes} bytes"
            dependants = Counter(held.parent for held in self._held.values() if held.holds_parent)
            lost = dependants.keys() - self._held.keys() - {ROOT}
            assert not lost, f"{len(lost)} parents are not held"
            leaves = set(self._leaves)
            assert len(self._leaves) <= 2 * len(self._held) + _HEAP_SLACK, f"{len(self._leaves)} leaves are listed"
            for pool in self._pools.values():
                pool.check_integrity()
            for key, held in self._held.items():
                needed = dependants[key]
                assert needed == held.dependants, f"{key.hex()[:8]}: {needed} != {held.dependants} dependants"
                assert needed or (held.used, key) in leaves, f"{key.hex()[:8]} is a leaf that nobody lists"

    # --- inside, under the lock

    def _put(self, block: StoredBlock) -> bool:
        """Whether the block is held now."""
        if self._closed:
            return False
        held = self._held.get(block.key)
        if held is not None:
            self._use(block.key, held)
            return True
        payload = memoryview(block.payload).cast("B")
        if not self._lineage.fits(block.group, payload.nbytes):
            self._tally.failed("unfit", f"{payload.nbytes} bytes in layer group {block.group}")
            return False
        parent = self._held.get(block.parent)
        needs_parent = block.holds_parent and block.parent != ROOT
        if needs_parent and parent is None:
            return False
        if parent is not None:
            self._use(block.parent, parent)  # a victim of its own child it must not be
        address = self._room(round_up(payload.nbytes, EXTENT_ALIGNMENT))
        if address is None:
            return False
        held = _Held(block.parent, block.holds_parent, address, payload.nbytes)
        _view(held)[:] = payload
        self._held[block.key] = held
        self._held_bytes += payload.nbytes
        self._stored_bytes += payload.nbytes
        if parent is not None:
            parent.dependants += block.holds_parent
        self._use(block.key, held)
        self._tally.count(stored_blocks=1, stored_bytes=payload.nbytes)
        return True

    def _room(self, extent_bytes: int) -> int | None:
        """The address of an extent. None: what is left to let go was brought by this call, or others need it."""
        pool = self._pools[extent_bytes]
        if extent_bytes > self._limit_bytes:
            return None
        while (address := pool.allocate()) is None:
            victim = self._coldest_leaf()
            if victim is None:
                return None
            self._forget(victim)
            self._tally.count(evicted_blocks=1)
        return address

    def _coldest_leaf(self) -> bytes | None:
        while self._leaves:
            used, key = self._leaves[0]
            if self._is_listed(used, key):
                return key if used < self._calls else None
            heappop(self._leaves)
        return None

    def _is_listed(self, used: int, key: bytes) -> bool:
        """Whether an entry of the heap is true: a leaf, last used then."""
        held = self._held.get(key)
        return held is not None and held.used == used and not held.dependants

    def _use(self, key: bytes, held: _Held) -> None:
        if held.used != self._calls:
            held.used = self._calls
            if not held.dependants:
                heappush(self._leaves, (held.used, key))

    def _forget(self, key: bytes) -> None:
        held = self._held.pop(key)
        self._held_bytes -= held.num_bytes
        self._pools[round_up(held.num_bytes, EXTENT_ALIGNMENT)].free(held.address)
        parent = self._held.get(held.parent)
        if parent is not None and held.holds_parent:
            parent.dependants -= 1
            if not parent.dependants:
                heappush(self._leaves, (parent.used, held.parent))

    def _prune(self) -> None:
        """Let go of the entries of the heap that are no longer true, once they are most of it."""
        if len(self._leaves) > 2 * len(self._held) + _HEAP_SLACK:
            self._leaves = [entry for entry in self._leaves if self._is_listed(*entry)]
            heapify(self._leaves)


def _view(held: _Held) -> memoryview:
    """The block's bytes where they lie."""
    return memoryview((ctypes.c_char * held.num_bytes).from_address(held.address)).cast("B")
