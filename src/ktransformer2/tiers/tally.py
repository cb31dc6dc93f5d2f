"""What one tier has counted, from any thread; and how a failure is told: a counter, and seldom a line in the log.

Knows no place. Invariants: no count is lost to a race; the log gets at most one line a minute for each kind of failure,
however often it fails, and says how many came meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from statistics import median_high

from ktransformer2.tiers.tier import Clock, TierStats

LOG = logging.getLogger("ktransformer2.tiers")
LOG_PAUSE_S = 60.0
_MOST_SIZES = 1024  # the median is that of the newest transfers


class Tally:
    """The counters of `TierStats`, by their names there."""

    def __init__(self, name: str, clock: Clock = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._sizes: deque[int] = deque(maxlen=_MOST_SIZES)
        self._logged: dict[str, tuple[float, int]] = {}  # kind -> when, and how many failures there were then

    def count(self, **amounts: int) -> None:
        """Add to counters: `count(loaded_blocks=2, loaded_bytes=4096)`."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def transfer(self, num_bytes: int) -> None:
        """One I/O call that carried payloads."""
        with self._lock:
            self._counts["transfers"] += 1
            self._sizes.append(num_bytes)

    def failed(self, what: str, why: object, times: int = 1) -> None:
        """Count a failure of the kind `what`. `why` goes to the log: no secret, no text of a prompt."""
        now = self._clock()
        with self._lock:
            self._failures[what] += times
            total = self._failures[what]
            logged_s, told = self._logged.get(what, (-LOG_PAUSE_S, 0))
            if logged_s <= now < logged_s + LOG_PAUSE_S:
                return
            self._logged[what] = now, total
        more = f" ({total - told} since the last line)" if total - told > times else ""
        LOG.warning("the %s tier: %s: %s%s; going on without", self._name, what, why, more)

    def stats(self, held_blocks: int, held_bytes: int, limit_bytes: int) -> TierStats:
        """The counts beside what is held now."""
        with self._lock:
            return TierStats(
                self._name,
                held_blocks,
                held_bytes,
                limit_bytes,
                median_transfer_bytes=median_high(self._sizes) if self._sizes else 0,
                failures=dict(self._failures),
                **self._counts,
            )
