"""S3-FIFO: a small queue that newcomers must leave used, a main queue, and keys of those that left the small one.

Quick to let go of what is seen once: a scan passes through a tenth of the cache. It forgets the order of use inside a
queue, which costs where recency matters. Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP
2023, algorithm 1. Other than there, room is made before the newcomer's key is known, and the size of the cache is the
most entries it ever held.

Invariants: an entry lies in one queue or is set aside; ghosts are no more than the entries the cache can hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ktransformer2.cache.replacement.policy import Entry, HintsUnread, Key, Queue

_SMALL, _MAIN = 1, 2
_SMALL_SHARE = 0.1
_MOST_FREQUENT = 3


class S3FIFO(HintsUnread):
    """`entry.queue` says which queue is its own; a place in it is kept while the entry is in use."""

    def __init__(self) -> None:
        self._queues = {_SMALL: Queue(), _MAIN: Queue()}
        self._frequency: dict[Entry, int] = {}
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._most_entries = 0

    def admit(self, entry: Entry) -> None:
        remembered = entry.key in self._ghosts
        self._ghosts.pop(entry.key, None)
        entry.queue = _MAIN if remembered else _SMALL
        self._frequency[entry] = 0
        self._most_entries = max(self._most_entries, len(self._frequency))

    def use(self, entry: Entry) -> None:
        self._frequency[entry] = min(self._frequency[entry] + 1, _MOST_FREQUENT)

    def offer(self, entry: Entry) -> None:
        if entry.aside:
            self.back(entry)
        elif entry not in self._queues[entry.queue]:
            self._queues[entry.queue].append(entry)

    def set_aside(self, entry: Entry) -> None:
        self._queues[entry.queue].discard(entry)

    def back(self, entry: Entry) -> None:
        self._queues[entry.queue].put_first(entry)

    def pick(self) -> Entry | None:
        small, main = self._queues[_SMALL], self._queues[_MAIN]
        while small or main:
            if small and (len(small) >= _SMALL_SHARE * self._most_entries or not main):
                entry = next(iter(small))
                if self._frequency[entry] <= 1:
                    return entry
                self._frequency[entry] = 0
                entry.queue = _MAIN
                del small[entry]
                main.append(entry)
            else:
                entry = next(iter(main))
                if self._frequency[entry] == 0 or entry.users:
                    return entry
                self._frequency[entry] -= 1
                main.move_to_end(entry)
        return None

    def forget(self, entry: Entry, evicted: bool) -> None:
        self._queues[entry.queue].discard(entry)
        del self._frequency[entry]
        if evicted and entry.queue == _SMALL:
            self._ghosts[entry.key] = None
        while len(self._ghosts) > self._most_entries:
            self._ghosts.popitem(last=False)

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        small, main = self._queues[_SMALL], self._queues[_MAIN]
        assert all(entry in small or entry in main for entry in candidates), "a candidate is in no queue"
        for mark, queue in self._queues.items():
            assert all(entry.queue == mark and not entry.aside for entry in queue), f"a stranger in queue {mark}"
            assert all(entry in self._frequency for entry in queue), f"an unknown entry in queue {mark}"
        assert len(self._ghosts) <= self._most_entries, f"{len(self._ghosts)} ghosts for {self._most_entries} entries"
