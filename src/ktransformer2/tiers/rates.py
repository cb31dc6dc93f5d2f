"""Load or recompute: what bringing tokens up takes and what computing them takes, from what was measured. Pure.

Knows no tier and no model; whoever measures hands in amounts, seconds and the time.

A measurement that is old is no reason to refuse: after `STALE_S` without a new one the next load is tried again, so
that a disk that was slow once, or a model that has become slower, is found out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

STALE_S = 60.0
_DECAY = 0.9  # what a sample weighs beside the next newer one
_MOST_SAMPLES = 32  # 0.9^32 = 3 %: what is older decides nothing


class DecayedMedian:
    """The weighted median of the newest samples; a newer one weighs more."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_MOST_SAMPLES)
        self.measured_s = 0.0  # when the newest sample was taken

    def add(self, sample: float, now: float) -> None:
        self._samples.append(sample)
        self.measured_s = now

    def value(self) -> float | None:
        """None: nothing was measured yet."""
        if not self._samples:
            return None
        newest_first = enumerate(reversed(self._samples))
        weighted = sorted((sample, _DECAY**age) for age, sample in newest_first)
        half = sum(weight for _, weight in weighted) / 2
        for sample, weight in weighted:
            half -= weight
            if half <= 0:
                return sample
        return weighted[-1][0]

    def is_fresh(self, now: float) -> bool:
        return now - self.measured_s < STALE_S


@dataclass(frozen=True)
class Estimate:
    """Seconds to load and seconds to compute the same tokens. None: not measured, or too long ago."""

    load_s: float | None
    compute_s: float | None

    @property
    def is_worth_loading(self) -> bool:
        """What is not known is tried: that is how it is measured."""
        return self.load_s is None or self.compute_s is None or self.load_s < self.compute_s


class LoadOrRecompute:
    """The measured speeds of one cache: of its tiers, of the way from there, and of the model that computes instead."""

    def __init__(self) -> None:
        self._bytes_per_s = DecayedMedian()
        self._overhead_s = DecayedMedian()
        self._tokens_per_s = DecayedMedian()

    def loaded(self, num_bytes: int, seconds: float, now: float) -> None:
        """One transfer that brought payloads up."""
        self._bytes_per_s.add(num_bytes / max(seconds, 1e-6), now)

    def waited(self, seconds: float, now: float) -> None:
        """How long a transfer lay there before the owner of the cache came by."""
        self._overhead_s.add(seconds, now)

    def computed(self, num_tokens: int, seconds: float, now: float) -> None:
        """One step that mostly read prompts."""
        self._tokens_per_s.add(num_tokens / max(seconds, 1e-6), now)

    def estimate(self, num_tokens: int, num_bytes: int, now: float) -> Estimate:
        """`num_tokens` whose blocks, and all that is loaded before them, are `num_bytes`."""
        bytes_per_s, tokens_per_s = self._bytes_per_s.value(), self._tokens_per_s.value()
        load_s = compute_s = None
        if bytes_per_s is not None and self._bytes_per_s.is_fresh(now):
            load_s = num_bytes / bytes_per_s + (self._overhead_s.value() or 0.0)
        if tokens_per_s is not None:
            compute_s = num_tokens / tokens_per_s
        return Estimate(load_s, compute_s)
