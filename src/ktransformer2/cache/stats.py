"""The cache's figures: running counters, and the frozen snapshot that readers get. Knows no metrics library.

A snapshot holds numbers only, no text and no token id; in JSON it is the same by the names of the fields.

Invariants: `filling_bytes + sealed_bytes + cached_bytes == used_bytes`, `used_bytes + free_bytes == committed_bytes`;
`hit_tokens <= findable_tokens <= lookup_tokens`.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from ktransformer2.errors import ConfigError

if TYPE_CHECKING:
    from ktransformer2.cache.block import BlockTable
    from ktransformer2.cache.block_store import BlockStore
    from ktransformer2.cache.lower import LowerStats
    from ktransformer2.cache.residency import Residency
    from ktransformer2.memory.arena import Arena

AGE_BOUNDS_S = (1, 10, 60, 300, 1800, 7200)
# Idle ages are taken from at most so many blocks a layer group, every k-th, so that a snapshot costs what it costs
# however large the cache is.
_MOST_AGES = 256
_QUANTILES = {"0.5": 0.5, "0.9": 0.9, "1": 1.0}


class AgeHistogram:
    """How many ages are at most each of `AGE_BOUNDS_S`, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(AGE_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(AGE_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def cumulative(self) -> Mapping[str, float]:
        """Counts by upper bound in seconds, each with those below it, the last one +Inf; then the sum in seconds."""
        names = [*map(str, AGE_BOUNDS_S), "+Inf"]
        return MappingProxyType(dict(zip(names, accumulate(self._counts), strict=True)) | {"sum": self._sum_s})


@dataclass
class Counters:
    """Totals since the cache was made, in tokens, blocks or bytes as named."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    findable_tokens: int = 0
    computed_tokens: int = 0
    copied_tokens: int = 0
    moved_bytes: int = 0
    defrag_runs: int = 0
    requests_since_defrag: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    lifetimes: AgeHistogram = field(default_factory=AgeHistogram)
    idle_before_eviction: AgeHistogram = field(default_factory=AgeHistogram)


@dataclass(frozen=True)
class CacheStats:
    """One snapshot. Bytes are bytes of this process; totals are since the cache was made.

    Memory. `committed_bytes` is the arena's memory. Of it `used_bytes` lie in extents of live blocks: `filling_bytes`
    in blocks that a sequence appends to, `cached_bytes` in blocks that no sequence uses, `sealed_bytes` in the others;
    `free_bytes` in none. `form_bytes` are the used ones by form. `table_bytes` are page tables and block tables,
    outside the arena. `held_bytes`, both together, is what `limit_bytes` bounds, and `peak_bytes` the most it ever was.
    `fragmentation_ratio` is that of the worst pool: 1 - longest stretch of unused extents / all unused ones.

    Of the used ones `pinned_bytes` are pinned (`KVCache.advice`); they are never `cached_bytes`.

    Reuse. Of `lookup_tokens` tokens of prompts that were looked up `hit_tokens` came from the cache, and
    `findable_tokens` would have with memory without end: what was found, or, if that is more, the leading whole blocks
    that the cache held at any time, under the same salt. Counted by remembering the hashes of evicted blocks
    (`Ghosts`), so it is a lower bound in two places: what was forgotten there, and parts of an evicted block.

    Time. `idle_age_s`: quantiles (0.5, 0.9, 1) of how long cached blocks have been unused; empty when there are none.
    `lifetime_s` and `idle_before_eviction_s`: of evicted blocks, from being published and from their last use until
    they left; cumulative counts by upper bound, and their sum. `taken_s` is this snapshot's time. All by the cache's
    clock.

    `evictions` by cause; `arena_calls` by kind: what was asked of the arena, whose commits and decommits are what the
    operating system sees.

    Tiers. `prefetched_blocks` were read from below: `prefetch_used_blocks` of them a prompt found,
    `prefetch_unused_blocks` were evicted before that, `prefetch_late_blocks` came when nobody waited any more,
    `prefetch_homeless_blocks` found no room; the others lie there. `not_worth_tokens` lay in a tier and were quicker
    to compute. `restored_tokens` were found by prompts, by the tier that had kept them. `written_blocks` a tier took.
    `staged_bytes` are copies in flight, part of `table_bytes`. `tier_bytes` by tier, `tier_failures` by tier and kind.
    """

    taken_s: float
    limit_bytes: int
    committed_bytes: int
    used_bytes: int
    filling_bytes: int
    sealed_bytes: int
    cached_bytes: int
    pinned_bytes: int
    free_bytes: int
    table_bytes: int
    peak_bytes: int
    num_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    num_filling_blocks: int
    lookup_tokens: int
    hit_tokens: int
    findable_tokens: int
    computed_tokens: int
    copied_tokens: int
    moved_bytes: int
    defrag_runs: int
    growth_events: int
    shrink_events: int
    prefetched_blocks: int
    prefetch_used_blocks: int
    prefetch_unused_blocks: int
    prefetch_late_blocks: int
    prefetch_homeless_blocks: int
    not_worth_tokens: int
    written_blocks: int
    staged_bytes: int
    fragmentation_ratio: float
    evictions: Mapping[str, int]
    form_bytes: Mapping[str, int]
    arena_calls: Mapping[str, int]
    idle_age_s: Mapping[str, float]
    lifetime_s: Mapping[str, float]
    idle_before_eviction_s: Mapping[str, float]
    restored_tokens: Mapping[str, int]
    tier_bytes: Mapping[str, int]
    tier_failures: Mapping[str, int]

    @property
    def held_bytes(self) -> int:
        """Everything that counts against the limit now."""
        return self.committed_bytes + self.table_bytes

    @property
    def hit_ratio(self) -> float:
        """Tokens taken from the cache over tokens looked up; 0 when nothing was looked up."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def normalised_hit_ratio(self) -> float | None:
        """Tokens taken from the cache over those that memory without end would have found. None: nothing repeated."""
        return self.hit_tokens / self.findable_tokens if self.findable_tokens else None

    @property
    def growth_per_1k_tokens(self) -> float:
        """Growth events per 1,000 computed tokens."""
        return 1000 * self.growth_events / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def prefetch_accuracy(self) -> float | None:
        """Prefetched blocks that were used over all prefetched ones. None: nothing was prefetched."""
        return self.prefetch_used_blocks / self.prefetched_blocks if self.prefetched_blocks else None

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, and dictionaries of numbers, by the names of the fields."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, found: object) -> Self:
        """What `as_json` made. Raises ConfigError."""
        values = read_numbers("cache", found, cls)
        frozen = {name: MappingProxyType(value) for name, value in values.items() if isinstance(value, Mapping)}
        return cls(**values | frozen)


def read_numbers(part: str, found: object, stats: type[Any]) -> dict[str, Any]:
    """The fields of the dataclass `stats`, numbers or mappings to numbers as it says. Raises ConfigError."""
    kinds = {each.name: str(each.type) for each in dataclasses.fields(stats)}
    values = dict(found) if isinstance(found, Mapping) else {}
    if wrong := set(kinds) ^ set(values):
        raise ConfigError(f"no snapshot of this version: {part} has no, or is not to have, {', '.join(sorted(wrong))}")
    numbers: list[object] = []
    for name, value in values.items():
        is_mapping = isinstance(value, Mapping)
        if is_mapping != kinds[name].startswith("Mapping"):
            raise ConfigError(f"no snapshot: {part} has {'several numbers' if is_mapping else 'one number'} as {name}")
        numbers += value.values() if isinstance(value, Mapping) else [value]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise ConfigError(f"no snapshot: {part} holds something that is no number")
    return values


def take_stats(
    arena: Arena, residency: Residency, tables: Sequence[BlockTable], lower: LowerStats, now: float
) -> CacheStats:
    """Read everything once. Cost: O(tables + runs), and a bounded look at the ages of cached blocks."""
    counters, stores = residency.counters, residency.stores
    pools = [pool for store in stores for pool in store.pools]
    used = sum(pool.used_bytes for pool in pools)
    num_filling, filling = _filling(stores, tables)
    return CacheStats(
        taken_s=now,
        limit_bytes=arena.stats.limit_bytes,
        committed_bytes=arena.stats.committed_bytes,
        used_bytes=used,
        filling_bytes=filling,
        sealed_bytes=used - filling - residency.cached_bytes,
        cached_bytes=residency.cached_bytes,
        pinned_bytes=residency.retention.pinned_bytes,
        free_bytes=arena.stats.committed_bytes - used,
        table_bytes=arena.stats.charged_bytes,
        peak_bytes=arena.stats.peak_bytes,
        num_blocks=sum(store.num_blocks for store in stores),
        num_cached_blocks=residency.num_cached,
        num_pinned_blocks=len(residency.retention.pins),
        num_filling_blocks=num_filling,
        lookup_tokens=counters.lookup_tokens,
        hit_tokens=counters.hit_tokens,
        findable_tokens=counters.findable_tokens,
        computed_tokens=counters.computed_tokens,
        copied_tokens=counters.copied_tokens,
        moved_bytes=counters.moved_bytes,
        defrag_runs=counters.defrag_runs,
        growth_events=arena.stats.growth_events,
        shrink_events=arena.stats.shrink_events,
        prefetched_blocks=lower.loaded_blocks,
        prefetch_used_blocks=lower.used_blocks,
        prefetch_unused_blocks=lower.unused_blocks,
        prefetch_late_blocks=lower.late_blocks,
        prefetch_homeless_blocks=lower.homeless_blocks,
        not_worth_tokens=lower.not_worth_tokens,
        written_blocks=lower.written_blocks,
        staged_bytes=lower.staged_bytes,
        fragmentation_ratio=max((pool.fragmentation_ratio for pool in pools), default=0.0),
        evictions=MappingProxyType(dict(counters.evictions)),
        form_bytes=_form_bytes(stores),
        arena_calls=MappingProxyType(
            {
                "commit": arena.stats.commit_calls,
                "decommit": arena.stats.decommit_calls,
                "huge_page": arena.stats.huge_page_calls,
            }
        ),
        idle_age_s=_idle_ages(stores, now),
        lifetime_s=counters.lifetimes.cumulative(),
        idle_before_eviction_s=counters.idle_before_eviction.cumulative(),
        restored_tokens=MappingProxyType(lower.restored_tokens),
        tier_bytes=MappingProxyType(lower.held_bytes),
        tier_failures=MappingProxyType(lower.failures),
    )


def _filling(stores: Sequence[BlockStore], tables: Sequence[BlockTable]) -> tuple[int, int]:
    """Blocks that a sequence appends to, and their bytes. Forks share one until they append."""
    num_blocks = num_bytes = 0
    for g, store in enumerate(stores):
        groups = [table.groups[g] for table in tables]
        open_ids = {int(group.entries[-1, 0]) for group in groups if group.open_entry}
        num_blocks += len(open_ids)
        num_bytes += sum(store.block_bytes(store.block(block_id)) for block_id in open_ids)
    return num_blocks, num_bytes


def _form_bytes(stores: Sequence[BlockStore]) -> Mapping[str, int]:
    by_form: dict[str, int] = {}
    for store in stores:
        for pool, layout in zip(store.pools, (store.open_layout, store.sealed_layout), strict=False):
            form = layout.forms[0][0].name.lower()
            by_form[form] = by_form.get(form, 0) + pool.used_bytes
    return MappingProxyType(by_form)


def _idle_ages(stores: Sequence[BlockStore], now: float) -> Mapping[str, float]:
    ages: list[float] = []
    for store in stores:
        looked_at = store.blocks[:: len(store.blocks) // _MOST_AGES + 1]
        ages += [now - block.last_used for block in looked_at if block is not None and not block.references]
    ages.sort()
    last = len(ages) - 1
    return MappingProxyType({name: ages[int(share * last)] for name, share in _QUANTILES.items()} if ages else {})
