"""Times to live: what has not been used for as long as it was given. One queue for each duration, so that each is in
order.

Invariant: within a queue deadlines do not fall, since they are starts plus one duration and starts come in order; a
start that comes late (an entry that waited for its children) is due when its queue's head is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ktransformer2.cache.replacement.policy import Entry


class Deadlines:
    """Entries and when they are due."""

    def __init__(self) -> None:
        self._queues: dict[float, OrderedDict[Entry, float]] = {}
        self._duration_of: dict[Entry, float] = {}

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._duration_of

    def __len__(self) -> int:
        return len(self._duration_of)

    def start(self, entry: Entry, began: float, duration: float) -> None:
        """The entry is due at `began + duration`; an earlier start of it is forgotten."""
        queue = self._queues.get(duration)
        if queue is None:
            queue = self._queues[duration] = OrderedDict()
        before = self._duration_of.get(entry)
        if before is not None and before != duration:
            self.stop(entry)
        self._duration_of[entry] = duration
        queue[entry] = began + duration
        queue.move_to_end(entry)

    def stop(self, entry: Entry) -> None:
        duration = self._duration_of.pop(entry, None)
        if duration is None:
            return
        queue = self._queues[duration]
        del queue[entry]
        if not queue:
            del self._queues[duration]

    def due(self, now: float) -> Iterator[Entry]:
        """Entries whose time has passed. Whoever takes one must `stop` it before asking for the next."""
        for queue in list(self._queues.values()):
            while queue:
                entry, deadline = next(iter(queue.items()))
                if deadline >= now:
                    break
                yield entry
                if next(iter(queue), None) is entry:  # it was left in place
                    break
