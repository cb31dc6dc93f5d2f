"""A snapshot's bytes and blocks by state, each state once. Pure."""

from __future__ import annotations

from ktransformer2.cache.stats import CacheStats


def state_bytes(stats: CacheStats) -> dict[str, int]:
    """Bytes by state: together they are `held_bytes`."""
    return {
        "filling": stats.filling_bytes,
        "sealed": stats.sealed_bytes,
        "cached": stats.cached_bytes,
        "free": stats.free_bytes,
        "tables": stats.table_bytes,
    }


def state_blocks(stats: CacheStats) -> dict[str, int]:
    """Blocks by state: together they are `num_blocks`."""
    sealed = stats.num_blocks - stats.num_cached_blocks - stats.num_filling_blocks
    return {"filling": stats.num_filling_blocks, "sealed": sealed, "cached": stats.num_cached_blocks}
