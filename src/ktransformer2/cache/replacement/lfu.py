"""Least frequently used, with dynamic aging: what was popular once does not stay for ever.

An entry's rank is its number of uses plus the rank of the last victim when it was last used, so that a newcomer
competes with those that were used since, not with all history. Among equal ranks the least recently used goes first.
Source: Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000 (LFU-DA); the buckets are
those of Shah, Mitra, Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme", 2010.

An entry that comes back (its children left, a hint ran out) keeps its rank, which may lie far below all others; so the
lowest is found by a heap, not by counting up.

Invariant: an entry lies in the bucket of its rank; no bucket is empty; `_ranks`, a heap, names every bucket, and some
that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from ktransformer2.cache.replacement.policy import Entry, HintsUnread, Queue

_SPARE_RANKS = 64


class LFU(HintsUnread):
    """Buckets of equal rank; `entry.queue` is the rank."""

    def __init__(self) -> None:
        self._buckets: dict[int, Queue] = {}
        self._ranks: list[int] = []
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
        while self._ranks[0] not in self._buckets:
            heappop(self._ranks)
        return self._buckets[self._ranks[0]].first()

    def forget(self, entry: Entry, evicted: bool) -> None:
        if evicted:
            self._age = max(self._age, entry.queue)
        self.set_aside(entry)

    def _bucket(self, entry: Entry) -> Queue:
        bucket = self._buckets.get(entry.queue)
        if bucket is None:
            bucket = self._buckets[entry.queue] = Queue()
            heappush(self._ranks, entry.queue)
            if len(self._ranks) > 2 * len(self._buckets) + _SPARE_RANKS:  # no victim was asked for in a while
                self._ranks = sorted(self._buckets)
        return bucket

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        held = {entry: rank for rank, bucket in self._buckets.items() for entry in bucket}
        assert held.keys() == set(candidates), "the buckets do not hold the candidates"
        for rank, bucket in self._buckets.items():
            assert bucket, f"the bucket of rank {rank} is empty"
            assert rank in self._ranks, f"rank {rank} is not in the heap"
        assert all(entry.queue == rank for entry, rank in held.items()), "an entry lies in a bucket of another rank"
