"""The cache's figures: running counters, and the frozen snapshot that readers get. Knows no metrics library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ktransformer2.cache.block_store import BlockStore
from ktransformer2.memory.arena import Arena


@dataclass
class Counters:
    """Totals since the cache was made, in tokens, blocks or bytes as named."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    copied_tokens: int = 0
    moved_bytes: int = 0
    defrag_runs: int = 0
    requests_since_defrag: int = 0
    evictions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheStats:
    """One snapshot. Bytes are bytes of this process.

    `committed_bytes` is the arena's memory, `used_bytes` of it lie in extents of live blocks, `cached_bytes` of those
    in blocks no sequence uses. `table_bytes` are page tables and block tables, outside the arena. `held_bytes`, both
    together, is what `limit_bytes` bounds, and `peak_bytes` the most it ever was.
    """

    limit_bytes: int
    committed_bytes: int
    used_bytes: int
    cached_bytes: int
    table_bytes: int
    peak_bytes: int
    num_blocks: int
    num_cached_blocks: int
    num_filling_blocks: int
    lookup_tokens: int
    hit_tokens: int
    computed_tokens: int
    copied_tokens: int
    moved_bytes: int
    defrag_runs: int
    growth_events: int
    shrink_events: int
    fragmentation_ratio: float
    evictions: Mapping[str, int]

    @property
    def held_bytes(self) -> int:
        """Everything that counts against the limit now."""
        return self.committed_bytes + self.table_bytes

    @property
    def hit_ratio(self) -> float:
        """Tokens taken from the cache over tokens looked up; 0 when nothing was looked up."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def growth_per_1k_tokens(self) -> float:
        """Growth events per 1,000 computed tokens."""
        return 1000 * self.growth_events / self.computed_tokens if self.computed_tokens else 0.0


def take_stats(arena: Arena, stores: Sequence[BlockStore], counters: Counters, cached_bytes: int) -> CacheStats:
    """Count everything once; O(blocks)."""
    blocks = [block for store in stores for block in store.live_blocks()]
    pools = [pool for store in stores for pool in store.pools]
    return CacheStats(
        limit_bytes=arena.stats.limit_bytes,
        committed_bytes=arena.stats.committed_bytes,
        used_bytes=sum(pool.used_bytes for pool in pools),
        cached_bytes=cached_bytes,
        table_bytes=arena.stats.charged_bytes,
        peak_bytes=arena.stats.peak_bytes,
        num_blocks=len(blocks),
        num_cached_blocks=sum(not block.references for block in blocks),
        num_filling_blocks=sum(block.rows < stores[block.group].sealed_layout.block_tokens for block in blocks),
        lookup_tokens=counters.lookup_tokens,
        hit_tokens=counters.hit_tokens,
        computed_tokens=counters.computed_tokens,
        copied_tokens=counters.copied_tokens,
        moved_bytes=counters.moved_bytes,
        defrag_runs=counters.defrag_runs,
        growth_events=arena.stats.growth_events,
        shrink_events=arena.stats.shrink_events,
        fragmentation_ratio=max((pool.fragmentation_ratio for pool in pools), default=0.0),
        evictions=MappingProxyType(dict(counters.evictions)),
    )
