"""The four figures that say whether a cache does well, each with its target. Pure: snapshots in, marks out.

Every figure is made of counters of the snapshot, so anybody can make it again. Too little to judge by is no fault: the
mark is then `early`, and where there is nothing to judge, `n/a`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ktransformer2.cache.stats import CacheStats
from ktransformer2.engine.troubles import MOST_FRAGMENTATION, MOST_GROWTHS_PER_1K_TOKENS

Mark = Literal["ok", "RED", "early", "n/a"]

LEAST_HIT_RATIO = 0.85
LEAST_PREFETCH_ACCURACY, MOST_PREFETCH_ACCURACY = 0.75, 0.90
# What a figure needs before it is judged. The alert rules have the same guards.
LEAST_FINDABLE_TOKENS, LEAST_GROWTHS, LEAST_BLOCKS, LEAST_PREFETCHED = 4096, 8, 32, 32


@dataclass(frozen=True)
class Figure:
    """One of the four. `value` is a ratio, or growths per 1,000 tokens; None: nothing to judge. `unit`: "%" or ""."""

    name: str
    value: float | None
    target: str
    mark: Mark
    note: str
    unit: str = "%"

    @property
    def shown(self) -> str:
        if self.value is None:
            return "-"
        return f"{100 * self.value:.1f} %" if self.unit else f"{self.value:.2f}"


def health(stats: CacheStats) -> list[Figure]:
    """All four, since the cache was made."""
    return [figure(stats) for figure in (hit_rate, growth, fragmentation, prefetch_accuracy)]


class _Judged(NamedTuple):
    """A value with what it is judged by: `enough` of `wanted` things were seen, `holds` it keeps its target."""

    value: float
    seen: int
    wanted: int
    holds: Callable[[float], bool]

    @property
    def mark(self) -> Mark:
        if self.seen < self.wanted:
            return "early"
        return "ok" if self.holds(self.value) else "RED"


def hit_rate(stats: CacheStats) -> Figure:
    """Hit tokens over findable ones: what the cache found of what memory without end would have."""
    value, target = stats.normalised_hit_ratio, ">= 85 %"
    if value is None:
        return Figure("hit rate", None, target, "n/a", "no repeats seen")
    judged = _Judged(value, stats.findable_tokens, LEAST_FINDABLE_TOKENS, lambda v: v >= LEAST_HIT_RATIO)
    note = f"of {stats.findable_tokens:,} findable tokens; {100 * stats.hit_ratio:.1f} % of all {stats.lookup_tokens:,}"
    return Figure("hit rate", value, target, judged.mark, note)


def growth(stats: CacheStats) -> Figure:
    value, target = stats.growth_per_1k_tokens, "< 5"
    if not stats.computed_tokens:
        return Figure("growth per 1,000 tokens", None, target, "n/a", "nothing computed yet", "")
    judged = _Judged(value, stats.growth_events, LEAST_GROWTHS, lambda v: v < MOST_GROWTHS_PER_1K_TOKENS)
    note = (
        f"{stats.growth_events:,} growths, {stats.shrink_events:,} shrinks, {stats.computed_tokens:,} tokens computed"
    )
    return Figure("growth per 1,000 tokens", value, target, judged.mark, note, "")


def fragmentation(stats: CacheStats) -> Figure:
    value = stats.fragmentation_ratio
    judged = _Judged(value, stats.num_blocks, LEAST_BLOCKS, lambda v: v <= MOST_FRAGMENTATION)
    note = f"{stats.num_blocks:,} blocks; {stats.defrag_runs:,} times defragmented"
    return Figure("fragmentation", value, "<= 30 %", judged.mark, note)


def prefetch_accuracy(stats: CacheStats) -> Figure:
    """Above its range it is red too: whoever is that sure fetches too little ahead."""
    value, target = stats.prefetch_accuracy, "75-90 %"
    if value is None:
        return Figure("prefetch accuracy", None, target, "n/a", "nothing was fetched ahead")
    judged = _Judged(
        value,
        stats.prefetched_blocks,
        LEAST_PREFETCHED,
        lambda v: LEAST_PREFETCH_ACCURACY <= v <= MOST_PREFETCH_ACCURACY,
    )
    note = f"{stats.prefetch_used_blocks:,} of {stats.prefetched_blocks:,} prefetched blocks were used"
    return Figure("prefetch accuracy", value, target, judged.mark, note)
