"""When blocks of a class are used again: hazard rates learned online, and what keeping one is worth at an age.

Every wait (from a use to the next, or to the last moment the key was remembered) is counted by class and age. Waits
that still run count as at risk up to their present age, so long waits do not look hopeless only because they are not
over (Kaplan-Meier). A class with few waits leans on all classes together.

The worth of keeping a block of age a is its Gittins index, the best rate of hits for the time it stays:

    max over T of  P(used within T | not used until a) / E[time until then, at most T]

so a class whose hazard first rises (a person reads and types) is kept through the lull.
Sources: Gittins, "Bandit processes and dynamic allocation indices", 1979; hit density by class and age as in Beckmann,
Chen, Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018.

Invariant: `_running` holds, by the epoch they began in, how many waits of each class still run.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2

import numpy as np
import numpy.typing as npt

_BINS_PER_DOUBLING = 2
_PER_S = 10.0  # ages below a tenth of a second share the first bin
NUM_BINS = 40  # up to a day
_EDGES_S = (2 ** (np.arange(NUM_BINS + 1) / _BINS_PER_DOUBLING) - 1) / _PER_S
_WIDTHS_S = np.diff(_EDGES_S)
_LEANING_WAITS = 20.0
_Rates = npt.NDArray[np.float64]


def _bin_of(tenths: float) -> int:
    return min(int(_BINS_PER_DOUBLING * log2(1.0 + tenths)), NUM_BINS - 1)


_BIN_OF_TENTHS = [_bin_of(tenths) for tenths in range(8192)]  # asked at every touch: a look-up is half of a logarithm


# The youngest age of each bin; some of the first bins hold no whole tenth and begin where the next one does.
BIN_STARTS_S = tuple(ceil(2 ** (number / _BINS_PER_DOUBLING) - 1) / _PER_S for number in range(NUM_BINS))


def age_bin(age_s: float) -> int:
    """The bin of an age: half a doubling wide."""
    tenths = int(_PER_S * age_s)
    return _BIN_OF_TENTHS[tenths] if tenths < 8192 else _bin_of(tenths)


def gittins(hazards: _Rates) -> _Rates:
    """The index at the start of each bin, from the chance [classes, NUM_BINS] to be used within a bin once there."""
    index = np.zeros_like(hazards)
    for start in range(NUM_BINS):
        chance = hazards[:, start:]
        after = np.cumprod(1 - chance, axis=1)  # [classes, bins]: not used until the end of the bin
        before = np.concatenate([np.ones((len(chance), 1)), after[:, :-1]], axis=1)
        hits = np.cumsum(before * chance, axis=1)
        time_s = np.cumsum(before * _WIDTHS_S[start:] * (1 - chance / 2), axis=1)
        index[:, start] = (hits / time_s).max(axis=1)
    return index


def _common(used: _Rates, at_risk: _Rates) -> _Rates:
    """What a class with few waits leans on: all classes of its half, since hints divide more than anything else."""
    halves = [np.array_split(counts, 2) for counts in (used, at_risk)]
    rates = [u.sum(axis=0) / np.maximum(r.sum(axis=0), 1.0) for u, r in zip(*halves, strict=True)]
    return np.repeat(rates, [len(half) for half in halves[0]], axis=0)


class ReuseModel:
    """Counts of waits and the index made from them. `worth[class][age_bin]` is hits a second of a block kept.

    A wait begins with `newest[class] += 1`, in `epoch`, which is to be handed back when the wait is over.
    """

    def __init__(self, num_classes: int, half_life_fits: float) -> None:
        """Counts of waits that are over halve every `half_life_fits` fits: people change."""
        self._used = [[0.0] * NUM_BINS for _ in range(num_classes)]
        self._lost = [[0.0] * NUM_BINS for _ in range(num_classes)]
        self.epoch = 1
        self.newest = [0] * num_classes
        self._running = {1: self.newest}
        self._began_s = {1: 0.0}
        self._keep = 0.5 ** (1 / half_life_fits)
        self.worth = [[0.0] * NUM_BINS for _ in range(num_classes)]

    def used(self, kind: int, epoch: int, age_s: float) -> None:
        """The wait ended with a use."""
        self._running[epoch][kind] -= 1
        tenths = int(_PER_S * age_s)
        self._used[kind][_BIN_OF_TENTHS[tenths] if tenths < 8192 else _bin_of(tenths)] += 1.0

    def lost(self, kind: int, epoch: int, age_s: float) -> None:
        """The wait was given up at that age; whether a use came later is not known."""
        self._running[epoch][kind] -= 1
        self._lost[kind][age_bin(age_s)] += 1.0

    def reclassify(self, before: int, after: int, epoch: int) -> None:
        """More is known of a running wait: it counts as of another class from its beginning."""
        self._running[epoch][before] -= 1
        self._running[epoch][after] += 1

    def fit(self, now: float) -> None:
        """Learn from all waits and open a new epoch. O(classes x epochs)."""
        used, lost = np.array(self._used), np.array(self._lost)
        at_age = lost.copy()
        for epoch, running in self._running.items():
            at_age[:, age_bin(max(0.0, now - self._began_s[epoch]))] += running
        over = used + at_age
        # At risk in a bin: all that came to it, those that left unused inside it for half of it.
        at_risk = np.cumsum(over[:, ::-1], axis=1)[:, ::-1] - at_age / 2
        hazards = (used + _LEANING_WAITS * _common(used, at_risk)) / (at_risk + _LEANING_WAITS)
        self.worth = gittins(np.minimum(hazards, 1.0)).tolist()
        self._used, self._lost = (used * self._keep).tolist(), (lost * self._keep).tolist()
        for epoch in [epoch for epoch, running in self._running.items() if not any(running)]:
            del self._running[epoch], self._began_s[epoch]
        self.epoch += 1
        self.newest = self._running[self.epoch] = [0] * len(self._used)
        self._began_s[self.epoch] = now

    def check_integrity(self, least: Mapping[tuple[int, int], int]) -> None:
        """`least`: waits of (class, epoch) that must be under way; there may be others, of entries set aside."""
        for epoch, running in self._running.items():
            for kind, count in enumerate(running):
                assert count >= least.get((kind, epoch), 0), f"{count} waits of class {kind}, epoch {epoch}"
        assert all(epoch in self._running for _, epoch in least), "a wait of an epoch that is over"
