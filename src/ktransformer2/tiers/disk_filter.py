"""The Bloom filter in front of the disk tier, and how it learns what other processes wrote. Knows no file.

Invariants: a key that this process wrote or read passes. What was denied although another process had written it is
counted at the next refresh, of the newest 4,096 denials.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from ktransformer2.tiers.bloom import BloomFilter
from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.tier import Clock

_MOST_DENIALS = 4096
_SPARE = 4  # a rebuilt filter has room for a quarter more keys


class DiskFilter:
    """Any thread may ask and tell."""

    def __init__(self, refresh_s: float, tally: Tally, clock: Clock = time.monotonic) -> None:
        self._refresh_s, self._tally, self._clock = refresh_s, tally, clock
        self._bloom = BloomFilter()
        self._lock = threading.Lock()
        self._denied: OrderedDict[bytes, None] = OrderedDict()
        self._refreshed_s: float | None = None

    def passes(self, key: bytes) -> bool:
        """Whether the key may be there. No I/O."""
        if key in self._bloom:
            return True
        with self._lock:
            self._denied[key] = None
            if len(self._denied) > _MOST_DENIALS:
                self._denied.popitem(last=False)
        return False

    def tell(self, keys: Iterable[bytes]) -> None:
        """Those keys are there."""
        with self._lock:
            for key in keys:
                self._bloom.add(key)
                self._denied.pop(key, None)

    def refresh(self, keys: Callable[[], Collection[bytes]]) -> None:
        """Rebuild it from `keys`, all that are there, when it is older than it may be, or full of what is gone."""
        now = self._clock()
        if self._refreshed_s is not None and now < self._refreshed_s + self._refresh_s and not self._bloom.is_worn:
            return
        self.rebuild(keys())
        self._refreshed_s = now

    def rebuild(self, keys: Collection[bytes]) -> None:
        """Forget all but `keys`."""
        with self._lock:
            missed = len(self._denied.keys() & set(keys))
            self._denied.clear()
            self._bloom.rebuild(keys, len(keys) + len(keys) // _SPARE)
        self._tally.count(filter_missed=missed)
