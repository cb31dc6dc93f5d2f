"""What `ktransformer-monitor` shows of a snapshot: tables of rows. Knows no terminal and no server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ktransformer2.cache.stats import AGE_BOUNDS_S, CacheStats
from ktransformer2.config import format_bytes
from ktransformer2.monitor.health import health
from ktransformer2.monitor.states import state_blocks, state_bytes

Rows = list[dict[str, object]]


@dataclass(frozen=True)
class View:
    """One metric by the name that `--metric` takes."""

    about: str
    tables: Callable[[CacheStats], Sequence[Rows]]


def health_rows(stats: CacheStats) -> Rows:
    return [
        {"figure": each.name, "value": each.shown, "target": each.target, "mark": each.mark, "": each.note}
        for each in health(stats)
    ]


def tier_rows(stats: CacheStats) -> Rows:
    """One row a tier; at present the memory of this machine is the only one."""
    forms = ", ".join(f"{form} {format_bytes(n)}" for form, n in stats.form_bytes.items() if n)
    return [
        {
            "tier": "memory",
            "capacity": format_bytes(stats.limit_bytes),
            "held": format_bytes(stats.held_bytes),
            "peak": format_bytes(stats.peak_bytes),
            "forms": forms or "-",
            "blocks": stats.num_blocks,
            "pinned": format_bytes(stats.pinned_bytes),
            "hit tokens": stats.hit_tokens,
            "moved": format_bytes(stats.moved_bytes),
            "evictions": sum(stats.evictions.values()),
        }
    ]


def memory_rows(stats: CacheStats) -> Rows:
    blocks = state_blocks(stats)
    return [
        {"state": state, "bytes": format_bytes(held), "blocks": blocks.get(state)}
        for state, held in state_bytes(stats).items()
    ]


def eviction_rows(stats: CacheStats) -> Rows:
    return [{"evicted for": cause, "blocks": count} for cause, count in sorted(stats.evictions.items())]


def age_rows(stats: CacheStats) -> Rows:
    """How long the blocks that nobody uses have been unused."""
    return [
        {"cached blocks": name, "unused for at most": _seconds(stats.idle_age_s[quantile])}
        for quantile, name in {"0.5": "half of them", "0.9": "nine of ten", "1": "all"}.items()
        if quantile in stats.idle_age_s
    ]


def lifetime_rows(stats: CacheStats) -> Rows:
    """How old evicted blocks became, and how long nobody had used them: shares of all of them."""
    columns = {"lived": stats.lifetime_s, "unused before": stats.idle_before_eviction_s}
    if not stats.lifetime_s["+Inf"]:
        return []
    bounds = [*map(str, AGE_BOUNDS_S), "+Inf"]
    return [
        {
            "evicted blocks": "all" if bound == "+Inf" else f"up to {_seconds(float(bound))}",
            **{name: _share(ages, bound) for name, ages in columns.items()},
        }
        for bound in bounds
    ]


def arena_rows(stats: CacheStats) -> Rows:
    return [{"arena": call, "calls": count} for call, count in stats.arena_calls.items()]


def _share(ages: Mapping[str, float], bound: str) -> str:
    return f"{100 * ages[bound] / ages['+Inf']:.0f} %"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


VIEWS: Mapping[str, View] = {
    "cache_stats": View(
        "the four health figures, then tier, bytes by state, evictions and ages",
        lambda s: [health_rows(s), tier_rows(s), memory_rows(s), eviction_rows(s), age_rows(s)],
    ),
    "health": View("the four health figures alone", lambda s: [health_rows(s)]),
    "tiers": View("where blocks are: capacity, use, forms, hits", lambda s: [tier_rows(s)]),
    "memory": View("bytes and blocks by state, calls of the arena", lambda s: [memory_rows(s), arena_rows(s)]),
    "evictions": View(
        "who left for what, and how old blocks became", lambda s: [eviction_rows(s), age_rows(s), lifetime_rows(s)]
    ),
}


def csv_row(stats: CacheStats) -> dict[str, object]:
    """The figures and every plain number of a snapshot: the same columns whatever the snapshot holds."""
    figures = {
        "hit_ratio": stats.hit_ratio,
        "normalised_hit_ratio": stats.normalised_hit_ratio,
        "growth_per_1k_tokens": stats.growth_per_1k_tokens,
        "prefetch_accuracy": stats.prefetch_accuracy,
    }
    plain = {each.name: getattr(stats, each.name) for each in dataclasses.fields(stats)}
    numbers = {name: value for name, value in plain.items() if not isinstance(value, Mapping)}
    return figures | numbers | {"evictions": sum(stats.evictions.values())}
