"""Which blocks stay: references, eviction, and room on demand. Knows no sequence and no token.

A block that nobody uses stays findable until room is needed, its share of the limit is spent, or it has idled too long.
A pin is a reference too, so that what is pinned is no more evictable, or cached, than what is in use.

Invariants: a block with references is never evicted; an unindexed block without references is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from ktransformer2.cache.block import Block, next_key
from ktransformer2.cache.block_store import BlockStore
from ktransformer2.cache.ghosts import Eviction, Ghosts
from ktransformer2.cache.prefix_index import PrefixIndex
from ktransformer2.cache.replacement import make_policy
from ktransformer2.cache.replacement.bands import Bands
from ktransformer2.cache.replacement.policy import Entry
from ktransformer2.cache.replacement.retention import Retention
from ktransformer2.cache.stats import Counters
from ktransformer2.config import CacheConfig
from ktransformer2.memory.arena import Arena

T = TypeVar("T")
# Keys of evicted blocks that are remembered: four times the blocks that the limit holds, within bounds. 65,536 of them
# take some 13 MB; where that is what a limit of 4 GB asks for, 0.3 % of it.
_GHOSTS_PER_BLOCK, _LEAST_GHOSTS, _MOST_GHOSTS = 4, 1024, 65_536


class Listener(Protocol):
    """Hears of full blocks on their way in and out."""

    def filled(self, block: Block) -> None:
        """Its rows are computed and it can be found."""

    def leaving(self, block: Block) -> None:
        """It is evicted next; its rows are still there."""

    def pinned(self, block: Block) -> None:
        """It is to stay, whatever comes."""


class Residency:
    """Blocks of all layer groups under one order of eviction, `config.replacement`.

    A block that can be found has an entry in `retention`, which says who goes next; a window needs none of what it has
    passed, so there a block does not hold the one before it.
    """

    def __init__(
        self, arena: Arena, stores: Sequence[BlockStore], clock: Callable[[], float], config: CacheConfig
    ) -> None:
        self._arena = arena
        self.stores = stores
        self.indexes = [PrefixIndex(self._admit, self._forget) for _ in stores]
        self.counters = Counters()
        self._clock = clock
        self.hints = Bands(make_policy(config.replacement, clock), clock)
        pin_limit = int(config.pinned_share_ratio * config.memory_bytes)
        self.retention = Retention(self.hints, clock, pin_limit_bytes=pin_limit, ttl_s=config.cached_idle_s)
        self._entries: dict[Block, Entry] = {}
        self._blocks: dict[Entry, Block] = {}
        self.cached_bytes = 0
        self.num_cached = 0
        self.listener: Listener | None = None
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
        self._hold(block)
        if block.indexed:
            self.retention.use(self._entries[block])

    def unrefer(self, block: Block) -> None:
        """One table entry less. Side effects: after the last one the block is cached, or freed if none can find it."""
        assert block.references > 0, f"{block} has no reference to give back"
        if block.indexed:
            self.retention.release(self._entries[block])
        self._let_go(block)

    def pin(self, blocks: Sequence[Block]) -> bool:
        """Hold blocks that can be found, a parent before its children. False: pins would pass their share of the limit,
        and nothing has changed.
        """
        if not self.retention.pin(self.entries(blocks)):
            return False
        for block in blocks:
            self._hold(block)
            if self.listener is not None:
                self.listener.pinned(block)
        return True

    def unpin(self, blocks: Sequence[Block]) -> None:
        """One pin less on each, a child before its parent."""
        self.retention.unpin(self.entries(blocks))
        for block in blocks:
            self._let_go(block)

    def pins(self) -> dict[Block, int]:
        """How often each pinned block is pinned."""
        return {self._blocks[entry]: count for entry, count in self.retention.pins.items()}

    def entries(self, blocks: Iterable[Block]) -> list[Entry]:
        """What replacement knows of blocks that can be found."""
        return [self._entries[block] for block in blocks]

    def _hold(self, block: Block) -> None:
        if block.references == 0 and block.indexed:
            self.cached_bytes -= self.stores[block.group].block_bytes(block)
            self.num_cached -= 1
        block.references += 1

    def _let_go(self, block: Block) -> None:
        block.references -= 1
        store = self.stores[block.group]
        if block.references:
            if block.indexed and block.references == self.retention.pins.get(self._entries[block]):
                store.drop_open(block)  # no sequence is left that could take rows back
            return
        if not block.indexed:
            store.free(block)
            return
        store.drop_open(block)
        block.last_used = self._clock()
        self.cached_bytes += store.block_bytes(block)
        self.num_cached += 1

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

    def charge(self, num_bytes: int) -> bool:
        """Count bytes outside of extents against the limit. False: there is no room, whoever leaves."""
        return self.take(lambda: self._arena.charge(num_bytes) or None) is not None

    def evict_one(self, cause: str, is_spared: Callable[[Block], bool] | None = None) -> bool:
        """Free what the policy names next: a leaf that nobody uses and that is not spared. False: there is none."""
        entry = self.retention.victim(None if is_spared is None else lambda entry: is_spared(self._blocks[entry]))
        if entry is None:
            return False
        self._evict(entry, cause)
        return True

    def evict_past(self, share_bytes: int) -> int:
        """Free cached blocks that nobody used for `cached_idle_s`, then those over `share_bytes`; how many."""
        evicted = 0
        while (entry := self.retention.expired()) is not None:
            self._evict(entry, "idle")
            evicted += 1
        while self.cached_bytes > share_bytes and self.evict_one("share"):
            evicted += 1
        return evicted

    def evict_all(self) -> None:
        while self.evict_one("clear"):
            pass

    def _evict(self, entry: Entry, cause: str) -> None:
        block = self._blocks[entry]
        store = self.stores[block.group]
        if self.listener is not None:
            self.listener.leaving(block)
        self.cached_bytes -= store.block_bytes(block)
        self.num_cached -= 1
        self._count(block, cause)
        self.retention.evict(entry)
        self.indexes[block.group].remove(block)
        store.free(block)

    def _admit(self, block: Block) -> None:
        """The block can be found from now on. Its key as replacement knows it names the layer group too."""
        group, store = bytes((block.group,)), self.stores[block.group]
        full = block.key is not None
        key = block.key or next_key(block.parent, block.tokens)
        # What it takes when its sequence is gone; rows as computed may be beside the sealed ones until then.
        layout = store.sealed_layout if full else store.open_layout
        entry = self.retention.admit(
            key + group,
            block.parent + group,
            layout.extent_bytes,
            full=full,
            holds_parent=store.group.window is None,
        )
        entry.users = block.references
        self._entries[block], self._blocks[entry] = entry, block

    def _forget(self, block: Block) -> None:
        """The block cannot be found any more: evicted just now, or filling again."""
        entry = self._entries.pop(block)
        del self._blocks[entry]
        if self.retention.get(entry.key) is entry:
            self.retention.forget(entry)

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
            for block in index:
                assert self._entries[block].users == block.references, f"{block} has another number of users"
        assert len(self._entries) == len(self._blocks) == len(self.retention) == sum(map(len, self.indexes)), "entries"
        self.retention.check_integrity()
        assert cached == self.cached_bytes, f"cached bytes {cached}, counted {self.cached_bytes}"
        assert num_cached == self.num_cached, f"{num_cached} cached blocks, counted {self.num_cached}"
