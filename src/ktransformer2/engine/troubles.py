"""What counters say about a cache that does not do well: the symptom, the counter that shows it, the knob to turn.

Pure: two snapshots in, findings out. Knows no configuration: a finding names the knob and the direction, not its value.
`docs/troubleshooting.md` has the same list for people, each row with the test that drives a cache into the trouble and
out of it again.

Invariants: a finding is made of counters alone, so anybody can make it again; too little to judge by is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ktransformer2.cache.stats import CacheStats
from ktransformer2.engine.outputs import EngineStats

# Growth of the arena costs a system call and later page faults; the growth policy itself stays below 4.
MOST_GROWTHS_PER_1K_TOKENS = 5.0
MOST_FRAGMENTATION = 0.30
LEAST_HIT_RATIO = 0.5
MOST_PREEMPTIONS_PER_REQUEST = 0.1
LEAST_PREFETCH_ACCURACY = 0.75
# Below these nothing is said: the first growths, a handful of blocks or one short prompt prove nothing.
_LEAST_GROWTHS, _LEAST_BLOCKS, _LEAST_LOOKUP_TOKENS, _LEAST_PREEMPTIONS = 8, 32, 4096, 2
_LEAST_PREFETCHED = 32


@dataclass(frozen=True)
class Finding:
    """One trouble. `value` of `counter` is past `limit`; turning `knob` as `advice` says takes it back."""

    trouble: str
    symptom: str
    counter: str
    value: float
    limit: float
    knob: str
    advice: str


def diagnose(cache: CacheStats, engine: EngineStats) -> list[Finding]:
    """The troubles that the counters show, in the order of the list in `docs/troubleshooting.md`; empty: none."""
    found = [look(cache, engine) for look in TROUBLES.values()]
    return [finding for finding in found if finding is not None]


def _thrash(cache: CacheStats, engine: EngineStats) -> Finding | None:
    """Growing what was just given back. A growth that stays is no thrash, nor is one shrink at the end of a peak."""
    if not _grows_too_often(cache) or 2 * cache.shrink_events < cache.growth_events:
        return None
    return Finding(
        "thrash",
        "memory is given back and taken again; steps stutter",
        "growth_per_1k_tokens",
        cache.growth_per_1k_tokens,
        MOST_GROWTHS_PER_1K_TOKENS,
        "shrink_threshold_ratio",
        f"{cache.shrink_events} shrinks beside {cache.growth_events} growths: lower shrink_threshold_ratio and "
        "low_free_ratio towards their defaults (0.5 and 0.2), or raise min_chunk_tokens (256)",
    )


def _small_steps(cache: CacheStats, engine: EngineStats) -> Finding | None:
    if not _grows_too_often(cache) or 2 * cache.shrink_events >= cache.growth_events:
        return None
    return Finding(
        "small steps",
        "memory grows in many small steps; a prompt is read more slowly",
        "growth_per_1k_tokens",
        cache.growth_per_1k_tokens,
        MOST_GROWTHS_PER_1K_TOKENS,
        "min_chunk_tokens",
        f"{cache.growth_events} growths: raise min_chunk_tokens (256), then growth_factor (1.5)",
    )


def _grows_too_often(cache: CacheStats) -> bool:
    return cache.growth_events >= _LEAST_GROWTHS and cache.growth_per_1k_tokens > MOST_GROWTHS_PER_1K_TOKENS


def _fragmentation(cache: CacheStats, engine: EngineStats) -> Finding | None:
    if cache.num_blocks < _LEAST_BLOCKS or cache.fragmentation_ratio <= MOST_FRAGMENTATION:
        return None
    if cache.defrag_runs and cache.moved_bytes:
        knob, advice = "maintain_bytes", "blocks are moved, but too few at a time: raise maintain_bytes (8 MiB)"
    else:
        knob, advice = "max_fragmentation_ratio", "nothing was moved yet: lower max_fragmentation_ratio (0.3)"
    return Finding(
        "fragmentation",
        "blocks of one text lie scattered between holes; attention reads more slowly",
        "fragmentation_ratio",
        cache.fragmentation_ratio,
        MOST_FRAGMENTATION,
        knob,
        f"{advice}, or defrag_interval_requests (1000)",
    )


def _churn(cache: CacheStats, engine: EngineStats) -> Finding | None:
    """Evicted for want of room, or of the share that blocks without a user may keep, before they were asked for."""
    if not _misses(cache) or _evicted(cache) <= _evicted_idle(cache) or _evicted(cache) < cache.num_blocks:
        return None
    room, share = cache.evictions.get("room", 0), cache.evictions.get("share", 0)
    by_share = share > room
    return Finding(
        "eviction churn",
        "a text that comes again is computed again: its blocks had to go",
        "evictions",
        room + share,
        cache.num_blocks,
        "cached_share_ratio" if by_share else "memory",
        f"hit ratio {cache.hit_ratio:.2f} with {room} blocks evicted for room and {share} for their share: "
        + ("raise cached_share_ratio (0.5), then memory" if by_share else "raise memory, or hold blocks in int8 (kv)"),
    )


def _forgotten(cache: CacheStats, engine: EngineStats) -> Finding | None:
    idle = _evicted_idle(cache)
    if not _misses(cache) or idle < _evicted(cache) or idle < max(1, cache.num_blocks):
        return None
    return Finding(
        "forgotten while idle",
        "a text that comes again after a pause is computed again",
        "evictions idle",
        idle,
        cache.num_blocks,
        "cached_idle_s",
        f"hit ratio {cache.hit_ratio:.2f} with {idle} blocks freed because nobody used them: raise cached_idle_s (300)",
    )


def _no_reuse(cache: CacheStats, engine: EngineStats) -> Finding | None:
    """Nothing had to go, and still nothing is found: texts do not begin alike, or not for as long as a block is."""
    if not _misses(cache) or _evicted(cache) + _evicted_idle(cache) >= max(1, cache.num_blocks):
        return None
    return Finding(
        "low hit rate",
        "every prompt is computed from its beginning although nothing was evicted",
        "hit_ratio",
        cache.hit_ratio,
        LEAST_HIT_RATIO,
        "block_tokens",
        "put what texts share first (system prompt, document, then the question); where they share less than a block, "
        "lower block_tokens (64); where nothing repeats, all is well",
    )


def _misses(cache: CacheStats) -> bool:
    return cache.lookup_tokens >= _LEAST_LOOKUP_TOKENS and cache.hit_ratio < LEAST_HIT_RATIO


def _evicted(cache: CacheStats) -> int:
    return cache.evictions.get("room", 0) + cache.evictions.get("share", 0)


def _evicted_idle(cache: CacheStats) -> int:
    return cache.evictions.get("idle", 0)


def _preemptions(cache: CacheStats, engine: EngineStats) -> Finding | None:
    most = MOST_PREEMPTIONS_PER_REQUEST * engine.num_added
    if engine.num_preemptions < _LEAST_PREEMPTIONS or engine.num_preemptions <= most:
        return None
    return Finding(
        "preemptions",
        "answers pause in the middle: more requests run than the memory holds",
        "num_preemptions",
        engine.num_preemptions,
        most,
        "max_num_sequences",
        f"{engine.num_preemptions} times among {engine.num_added} requests: raise memory, or lower max_num_sequences "
        "(32)",
    )


def _poor_prefetch(cache: CacheStats, engine: EngineStats) -> Finding | None:
    """Blocks are brought up from tiers and nobody finds them: most often for want of room, or for being late."""
    accuracy = cache.prefetch_accuracy
    if cache.prefetched_blocks < _LEAST_PREFETCHED or accuracy is None or accuracy >= LEAST_PREFETCH_ACCURACY:
        return None
    no_room, late = cache.prefetch_unused_blocks + cache.prefetch_homeless_blocks, cache.prefetch_late_blocks
    if no_room >= late:
        knob, advice = "memory", "raise memory, or cached_share_ratio (0.5)"
    else:
        knob, advice = "disk_directory", "name a directory on a faster disk, or a nearer server"
    return Finding(
        "poor prefetch",
        "blocks are brought up from a tier and not used; their prompts are computed all the same",
        "prefetch_accuracy",
        accuracy,
        LEAST_PREFETCH_ACCURACY,
        knob,
        f"of {cache.prefetched_blocks} blocks {no_room} found no room or had to go, {late} came too late: {advice}",
    )


# In the order in which they are looked for and listed.
TROUBLES: Mapping[str, Callable[[CacheStats, EngineStats], Finding | None]] = {
    "thrash": _thrash,
    "small steps": _small_steps,
    "fragmentation": _fragmentation,
    "eviction churn": _churn,
    "forgotten while idle": _forgotten,
    "low hit rate": _no_reuse,
    "preemptions": _preemptions,
    "poor prefetch": _poor_prefetch,
}
