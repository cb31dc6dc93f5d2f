"""Memory over the course of a run: samples of the cache's figures, with the moments worth naming. Pure data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ktransformer2.layout import ModelGeometry

if TYPE_CHECKING:
    from ktransformer2.cache.stats import CacheStats


@dataclass(frozen=True)
class Sample:
    """One look at the cache.

    `held_bytes` are committed extents and tables; `used_bytes` of them are extents of live blocks. `tokens` is what the
    sequence in work holds.
    """

    seconds: float
    tokens: int
    held_bytes: int
    used_bytes: int
    moment: str = ""


def static_cache_bytes(geometry: ModelGeometry, num_tokens: int) -> int:
    """What a static cache of `num_tokens` holds from the first token on: 16 bits an element, every layer in full."""
    return 2 * num_tokens * sum(group.elements_per_token for group in geometry.groups)


@dataclass
class MemoryCurve:
    """Samples in order of time. `stats` is asked at every sample; `static_bytes` is the line to compare with."""

    stats: Callable[[], CacheStats]
    static_bytes: int
    clock: Callable[[], float] = time.perf_counter
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def sample(self, tokens: int, moment: str = "") -> Sample:
        """Look now. `moment` names the sample in the table."""
        stats = self.stats()
        held = stats.held_bytes
        taken = Sample(self.clock() - self._began, tokens, held, stats.used_bytes, moment)
        self.samples.append(taken)
        return taken

    @property
    def moments(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.moment]

    @property
    def peak_bytes(self) -> int:
        return max((sample.held_bytes for sample in self.samples), default=0)
