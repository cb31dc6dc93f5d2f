"""Which blocks stay: references, eviction, and room on demand. Knows no sequence and no token.

A block that nobody uses stays findable until room is needed, its share of the limit is spent, or it has idled too long.

Invariants: a block with references is never evicted; an unindexed block without references is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ktransformer2.cache.block import Block
from ktransformer2.cache.block_store import BlockStore
from ktransformer2.cache.ghosts import Eviction, Ghosts
from ktransformer2.cache.prefix_index import PrefixIndex
from ktransformer2.cache.replacement import LeavesFirstLRU
from ktransformer2.cache.stats import Counters
from ktransformer2.memory.arena import Arena

T = TypeVar("T")
# Keys of evicted blocks that are remembered: four times the blocks that the limit holds, within bounds. 65,536 of them
# take some 13 MB; where that is what a limit of 4 GB asks for, 0.3 % of it.
_GHOSTS_PER_BLOCK, _LEAST_GHOSTS, _MOST_GHOSTS = 4, 1024, 65_536


class Residency:
    """Blocks of all layer groups under one order of eviction."""

    def __init__(self, arena: Arena, stores: Sequence[BlockStore], clock: Callable[[], float]) -> None:
        self._arena = arena
        self.stores = stores
        self.indexes = [PrefixIndex() for _ in stores]
        self.counters = Counters()
        self._clock = clock
        self._lru = LeavesFirstLRU(self._is_leaf)
        self.cached_bytes = 0
        self.num_cached = 0
        blocks = arena.stats.limit_bytes // sum(store.sealed_layout.extent_bytes for store in stores)
        self.ghosts = Ghosts(min(max(_GHOSTS_PER_BLOCK * blocks, _LEAST_GHOSTS), _MOST_GHOSTS))

    def was_seen(self, key: bytes) -> bool:
        """Whether the cache holds that prefix in some layer group, or did as long as is remembered."""
        return any(index.get(key) is not None for index in self.indexes) or self.ghosts.get(key) is not None

    def has_child(self, parent: bytes) -> bool:
        """Whether any block can be found behind `parent`."""
        return any(index.has_child(parent) for index in self.indexes)

    def refer(self, block: Block) -> None:
        """One more table entry names the block."""
        if block.references == 0 and block.indexed:
            self.cached_bytes -= self.stores[block.group].block_bytes(block)
            self.num_cached -= 1
        block.references += 1

    def unrefer(self, block: Block) -> None:
        """One table entry less. Side effects: after the last one the block is cached, or freed if none can find it."""
        assert block.references > 0, f"{block} has no reference to give back"
        block.references -= 1
        if block.references:
            return
        store = self.stores[block.group]
        if not block.indexed:
            store.free(block)
            return
        store.drop_open(block)
        block.last_used = self._clock()
        self.cached_bytes += store.block_bytes(block)
        self.num_cached += 1
        self._lru.offer(block)

    def could_hold(self, num_bytes: int) -> bool:
        """Whether that many bytes of extents are free, reclaimable, or held by blocks that can be evicted."""
        reclaimable = sum(pool.reclaimable_bytes for store in self.stores for pool in store.pools)
        return num_bytes <= self._arena.free_bytes + reclaimable + self.cached_bytes

    def take(self, attempt: Callable[[], T | None]) -> T | None:
        """`attempt()` until it gives something, evicting one block after another. None: nothing is left to evict."""
        while (taken := attempt()) is None:
            if not self.evict_one("room"):
                return None
        return taken

    def evict_one(self, cause: str) -> bool:
        """Free the least recently used leaf that nobody uses. False: there is none."""
        block = self._lru.oldest()
        if block is None:
            return False
        self._evict(block, cause)
        return True

    def evict_past(self, share_bytes: int, idle_before: float) -> int:
        """Free cached blocks over `share_bytes`, and those last used before `idle_before`; how many."""
        evicted = 0
        while (block := self._lru.oldest()) is not None:
            idle = block.last_used < idle_before
            if not idle and self.cached_bytes <= share_bytes:
                break
            self._evict(block, "idle" if idle else "share")
            evicted += 1
        return evicted

    def evict_all(self) -> None:
        while self.evict_one("clear"):
            pass

    def _is_leaf(self, block: Block) -> bool:
        """Whether no other block becomes useless without this one; a window needs none of what it has passed."""
        windowed = self.stores[block.group].group.window is not None
        return windowed or self.indexes[block.group].is_leaf(block)

    def _evict(self, block: Block, cause: str) -> None:
        store, index = self.stores[block.group], self.indexes[block.group]
        parent = index.get(block.parent)
        self.cached_bytes -= store.block_bytes(block)
        self.num_cached -= 1
        self._count(block, cause)
        index.remove(block)
        store.free(block)
        if parent is not None:
            self._lru.offer(parent)

    def _count(self, block: Block, cause: str) -> None:
        """One eviction, with how old the block became and how long nobody had used it."""
        now, counters = self._clock(), self.counters
        counters.evictions[cause] = counters.evictions.get(cause, 0) + 1
        counters.lifetimes.add(now - block.published_s)
        counters.idle_before_eviction.add(now - block.last_used)
        if block.key is not None:
            self.ghosts.add(block.key, Eviction(now, cause))

    def check_integrity(self) -> None:
        cached = num_cached = 0
        for store, index in zip(self.stores, self.indexes, strict=True):
            store.check_integrity()
            index.check_integrity()
            live = {id(block) for block in store.live_blocks()}
            assert all(id(block) in live for block in index), "an indexed block is not alive"
            for block in store.live_blocks():
                assert block.references or block.indexed, f"{block} is neither used nor findable"
                cached += 0 if block.references else store.block_bytes(block)
                num_cached += not block.references
        assert cached == self.cached_bytes, f"cached bytes {cached}, counted {self.cached_bytes}"
        assert num_cached == self.num_cached, f"{num_cached} cached blocks, counted {self.num_cached}"
