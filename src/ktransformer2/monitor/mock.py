"""Answers of a server that is not there, for a look at the monitor: made up, and the same ones every time."""

from __future__ import annotations

from typing import Any

from ktransformer2.cache.stats import CacheStats

MODEL = "mock-135M"


def answer(tick: int) -> dict[str, Any]:
    """What /v1/cache/stats might say at the `tick`-th look: a cache at work, whose hit rate is below its target."""
    turns = tick + 1
    used, cached = 812_000_000 + 3_000_000 * turns, 401_000_000
    stats = CacheStats(
        taken_s=2.0 * tick,
        limit_bytes=2_000_000_000,
        committed_bytes=used + 12_000_000,
        used_bytes=used,
        filling_bytes=8_600_000,
        sealed_bytes=used - cached - 8_600_000,
        cached_bytes=cached,
        pinned_bytes=21_000_000,
        free_bytes=12_000_000,
        table_bytes=1_900_000,
        peak_bytes=1_310_000_000,
        num_blocks=1090 + 4 * turns,
        num_cached_blocks=526,
        num_pinned_blocks=28,
        num_filling_blocks=6,
        lookup_tokens=412_000 * turns,
        hit_tokens=251_000 * turns,
        findable_tokens=304_000 * turns,
        computed_tokens=190_000 * turns,
        copied_tokens=512,
        moved_bytes=41_000_000,
        defrag_runs=12,
        growth_events=610 * turns,
        shrink_events=38,
        prefetched_blocks=0,
        prefetch_used_blocks=0,
        prefetch_unused_blocks=0,
        prefetch_late_blocks=0,
        prefetch_homeless_blocks=0,
        not_worth_tokens=0,
        written_blocks=0,
        staged_bytes=0,
        fragmentation_ratio=0.11,
        evictions={"room": 214 * turns, "share": 77, "idle": 590},
        form_bytes={"bf16": 8_600_000, "int8": used - 8_600_000},
        arena_calls={"commit": 640 * turns, "decommit": 92, "huge_page": 31},
        idle_age_s={"0.5": 41.0, "0.9": 188.0, "1": 299.0},
        lifetime_s=_ages(881, 96_000.0),
        idle_before_eviction_s=_ages(881, 81_000.0),
        restored_tokens={},
        tier_bytes={},
        tier_failures={},
    )
    return {"model": MODEL, "age_s": 0.4, "health": [], "cache": stats.as_json()}


def _ages(count: int, total_s: float) -> dict[str, float]:
    shares = {"1": 0.0, "10": 0.02, "60": 0.31, "300": 0.94, "1800": 0.99, "7200": 1.0, "+Inf": 1.0}
    return {bound: float(round(share * count)) for bound, share in shares.items()} | {"sum": total_s}
