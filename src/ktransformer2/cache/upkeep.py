"""What is done between steps: idle and surplus blocks go, memory goes back, extents close up. For `KVCache` only.

Knows no prefix and no request. What one `maintain` moves is bounded by `CacheConfig.maintain_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from ktransformer2.cache.block import BLOCK, RELEASED, BlockTable
from ktransformer2.cache.residency import Residency
from ktransformer2.config import CacheConfig
from ktransformer2.memory.arena import Arena
from ktransformer2.memory.slab import SlabPool

# Blocks freed between two looks for holes: a look costs some 10 us a run, a decode step frees no block.
_FREES_PER_LOOK = 16


class Upkeep:
    """The upkeep of one cache's blocks. `tables` is the cache's own set: those that may hold blocks."""

    def __init__(self, arena: Arena, residency: Residency, tables: Set[BlockTable], config: CacheConfig) -> None:
        self._arena, self._residency, self._tables, self._config = arena, residency, tables, config
        self._defrag_due = False
        self._frees_seen = 0

    @property
    def pools(self) -> list[SlabPool]:
        return [pool for store in self._residency.stores for pool in store.pools]

    def maintain(self, finished_requests: int, idle_s: float) -> None:
        """As `KVCache.maintain`. `idle_s`: how long nothing was published."""
        counters, config = self._residency.counters, self._config
        share = int(config.cached_share_ratio * config.memory_bytes)
        self._residency.evict_past(share)
        idle = idle_s >= config.cached_idle_s
        for pool in self.pools:
            pool.shrink()
        if idle and any(pool.reclaimable_bytes for pool in self.pools):
            self.give_back()  # nothing came for so long that no chunk is kept for it either
        counters.requests_since_defrag += finished_requests
        self._defrag_due |= counters.requests_since_defrag >= config.defrag_interval_requests
        frees = sum(pool.stats.frees for pool in self.pools)
        if frees - self._frees_seen >= _FREES_PER_LOOK:  # only frees make holes
            self._frees_seen = frees
            self._defrag_due |= any(p.fragmentation_ratio > config.max_fragmentation_ratio for p in self.pools)
        if self._defrag_due:
            self._defrag_due = self.defragment(config.maintain_bytes) > 0

    def defragment(self, budget_bytes: int) -> int:
        """Compact extents; bytes moved, hardly more than `budget_bytes`."""
        counters = self._residency.counters
        moved = 0
        for g, store in enumerate(self._residency.stores):
            chains = [
                [store.block(i) for i in table.groups[g].entries[:, BLOCK].tolist() if i != RELEASED]
                for table in self._tables
            ]
            moved += store.defragment(budget_bytes - moved, chains)
        counters.moved_bytes += moved
        counters.defrag_runs += 1
        if moved == 0:
            counters.requests_since_defrag = 0
        return moved

    def give_back(self) -> None:
        """Free memory goes back to the system."""
        for pool in self.pools:
            pool.trim()
        for store in self._residency.stores:
            store.shrink_tables()

    def check_integrity(self) -> None:
        """Recount everything; an assertion names what differs."""
        self._residency.check_integrity()
        self._arena.check_integrity()
        pins = self._residency.pins().items()
        named: Counter[tuple[int, int]] = Counter({(block.group, block.block_id): count for block, count in pins})
        for table in self._tables:
            for g, group_table in enumerate(table.groups):
                assert group_table.num_rows == table.num_tokens + table.pending, (
                    f"group {g}: {group_table.num_rows} rows, {table.num_tokens} tokens, {table.pending} pending"
                )
                named.update(
                    (g, block_id) for block_id in group_table.entries[:, BLOCK].tolist() if block_id != RELEASED
                )
        for g, store in enumerate(self._residency.stores):
            for block in store.live_blocks():
                count = named.pop((g, block.block_id), 0)
                assert block.references == count, f"{block} is named by {count} entries and pins"
        assert not named, f"entries name free blocks: {sorted(named)}"
