"""Least recently used. Since tables are released tail first, a parent is always younger than its children.

Right when recency is all there is to know, and as the yardstick of every other policy.
"""

from __future__ import annotations

from collections.abc import Iterable

from ktransformer2.cache.replacement.policy import Entry, HintsUnread, Queue


class LRU(HintsUnread):
    """One queue in the order of last use."""

    def __init__(self) -> None:
        self._queue = Queue()

    def admit(self, entry: Entry) -> None:
        """Nothing is known of it before it is offered."""

    def use(self, entry: Entry) -> None:
        self._queue.pop(entry, None)

    def offer(self, entry: Entry) -> None:
        self._queue[entry] = None

    def set_aside(self, entry: Entry) -> None:
        self._queue.discard(entry)

    def back(self, entry: Entry) -> None:
        self._queue.put_first(entry)

    def pick(self) -> Entry | None:
        return next(iter(self._queue), None)

    def forget(self, entry: Entry, evicted: bool) -> None:
        self._queue.discard(entry)

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        assert set(candidates) == set(self._queue), "the queue does not hold the candidates"
