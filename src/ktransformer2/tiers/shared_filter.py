"""A Bloom filter in front of a place that others write to as well: what this process knows of it, refreshed by scans.

What this process wrote or read is never denied. What others wrote since the last scan may be: that costs a hit, and is
counted once a later scan finds it. Before the first scan nothing is denied. Knows no server: whoever scans says what
was found. In front of the disk and of a server alike.

Invariant: `denied` holds at most `MOST_DENIED` keys, the newest ones.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from ktransformer2.tiers.bloom import BloomFilter

MOST_DENIED = 2**14  # 2 MB; what is older is not counted


class SharedFilter:
    """Any thread; one scan at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bloom: BloomFilter | None = None
        self._since: set[bytes] | None = None  # what this process touched since the scan that is running began
        self._denied: dict[bytes, None] = {}

    @property
    def is_worn(self) -> bool:
        """Whether growth or what is gone has filled it past its promise: time for a scan."""
        return self._bloom is not None and self._bloom.is_worn

    def may_hold(self, key: bytes) -> bool:
        """False: surely not, of what this process touched or the last scan found."""
        if self._bloom is None or key in self._bloom:
            return True
        with self._lock:
            self._denied[key] = None
            if len(self._denied) > MOST_DENIED:
                del self._denied[next(iter(self._denied))]
        return False

    def passes(self, key: bytes) -> bool:
        """Whether a filter has been made and holds the key; nothing is noted."""
        return self._bloom is not None and key in self._bloom

    def add(self, keys: Iterable[bytes]) -> None:
        """What this process writes or has read. What it had been denied was not there then, so it was not missed."""
        with self._lock:
            for key in keys:
                self._denied.pop(key, None)
                if self._bloom is not None:
                    self._bloom.add(key)
                if self._since is not None:
                    self._since.add(key)

    def begin_scan(self) -> None:
        """From here on what this process touches is added to the next filter too: the scan may have passed it by."""
        with self._lock:
            self._since = set()

    def end_scan(self, found: Collection[bytes] | None) -> int:
        """Put a filter of `found` in place; None: the scan was broken off, and the old one stays.

        Returns how many of the keys that were denied since the scan before have been found: what was missed, at most,
        since some may have been written after they were asked for. Others go on with the old filter meanwhile.
        """
        if found is None:
            with self._lock:
                self._since = None
            return 0
        bloom = BloomFilter()
        bloom.rebuild(found)
        with self._lock:
            denied, self._denied = self._denied, {}
            bloom.add_many(self._since or ())
            self._since, self._bloom = None, bloom
        return sum(key in denied for key in found) if denied else 0
