"""Least frequently used, with dynamic aging: what was popular once does not stay for ever.

An entry's rank is its number of uses plus the rank of the last victim when it was last used, so that a newcomer
competes with those that were used since, not with all history. Among equal ranks the least recently used goes first.
Source: Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000 (LFU-DA); the buckets are
those of Shah, Mitra, Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme", 2010.

Invariant: an entry lies in the bucket of its rank; no bucket is empty; none lies below `_lowest`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ktransformer2.cache.replacement.policy import Entry, HintsUnread, Queue


class LFU(HintsUnread):
    """Buckets of equal rank; `entry.queue` is the rank."""

    def __init__(self) -> None:
        self._buckets: dict[int, Queue] = {}
        self._lowest = 0
        self._age = 0  # the rank of the last victim

    def admit(self, entry: Entry) -> None:
        entry.queue = self._age + 1

    def use(self, entry: Entry) -> None:
        self.set_aside(entry)
        entry.queue = max(entry.queue, self._age) + 1

    def offer(self, entry: Entry) -> None:
        self._bucket(entry).append(entry)

    def set_aside(self, entry: Entry) -> None:
        bucket = self._buckets.get(entry.queue)
        if bucket is not None and entry in bucket:
            del bucket[entry]
            if not bucket:
                del self._buckets[entry.queue]

    def back(self, entry: Entry) -> None:
        self._bucket(entry).put_first(entry)

    def pick(self) -> Entry | None:
        if not self._buckets:
            return None
        while self._lowest not in self._buckets:  # ranks grow by one a use, so this is paid for by uses
            self._lowest += 1
        return self._buckets[self._lowest].first()

    def forget(self, entry: Entry, evicted: bool) -> None:
        if evicted:
            self._age = max(self._age, entry.queue)
        self.set_aside(entry)

    def _bucket(self, entry: Entry) -> Queue:
        self._lowest = min(self._lowest, entry.queue)
        bucket = self._buckets.get(entry.queue)
        if bucket is None:
            bucket = self._buckets[entry.queue] = Queue()
        return bucket

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        held = {entry: rank for rank, bucket in self._buckets.items() for entry in bucket}
        assert held.keys() == set(candidates), "the buckets do not hold the candidates"
        for rank, bucket in self._buckets.items():
            assert bucket, f"the bucket of rank {rank} is empty"
            assert rank >= self._lowest, f"rank {rank} lies below the lowest, {self._lowest}"
        assert all(entry.queue == rank for entry, rank in held.items()), "an entry lies in a bucket of another rank"
