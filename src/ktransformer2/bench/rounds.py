"""Interleaved rounds, medians and their intervals. Knows nothing of what is timed.

Contenders take turns inside every round, in an order drawn anew each round, so that a slow minute of the machine hits
all of them. Ratios are taken inside a round, then their median: the drift between rounds cancels.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Clock = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """A median and an interval around it that covers the true median in at least 95 of 100 repetitions.

    With fewer than six values no such interval exists and `low`, `high` are the extremes.
    """

    median: float
    low: float
    high: float
    count: int

    def as_row(self, name: str, factor: float = 1.0) -> dict[str, float]:
        """`name`, `name_low`, `name_high`, each times `factor` (a change of unit)."""
        return {name: self.median * factor, f"{name}_low": self.low * factor, f"{name}_high": self.high * factor}


def spread(values: Sequence[float]) -> Spread:
    """The order-statistics interval: ranks k and n+1-k, with k the largest whose two tails hold at most 5 %."""
    assert values, "no values to take a median of"
    ordered = sorted(values)
    n = len(ordered)
    tail, rank = 0.0, 0
    while rank < n // 2:
        tail += math.comb(n, rank) / 2**n
        if 2 * tail > 0.05:
            break
        rank += 1
    lowest = max(rank - 1, 0)
    return Spread(median(ordered), ordered[lowest], ordered[n - 1 - lowest], n)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not pass."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, seed: int = 0, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every contender in every round, after one call of each that is not counted."""
    order = list(contenders)
    rng = random.Random(seed)
    for call in contenders.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            begin = clock()
            contenders[name]()
            seconds[name].append(clock() - begin)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """`above / below`, round by round."""
    return spread([a / b for a, b in zip(above, below, strict=True)])
