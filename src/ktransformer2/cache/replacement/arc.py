"""ARC: a list of what was seen once, one of what was seen again, and keys of what left each; ghosts tell which to grow.

Adapts between recency and frequency. On prefix chains it wins little: a conversation that is over looks frequent too.
Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure 4.
The paper replaces after it has seen the request x; here room is made before x is known, so REPLACE cannot favour the
side x's ghost is on when |T1| = p. `c`, the paper's cache size, is the most entries the cache ever held.

Invariants (figure 1 of the paper): |T1| + |B1| <= c; |T1| + |T2| + |B1| + |B2| <= 2c; a key is in one list only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ktransformer2.cache.replacement.policy import Entry, HintsUnread, Key, Queue

_ONCE, _AGAIN = 1, 2


class ARC(HintsUnread):
    """T1, T2 hold candidates; |T1| and |T2| count entries in use and set aside too, by `entry.queue`."""

    def __init__(self) -> None:
        self._t1, self._t2 = Queue(), Queue()
        self._b1: OrderedDict[Key, None] = OrderedDict()
        self._b2: OrderedDict[Key, None] = OrderedDict()
        self._size = {_ONCE: 0, _AGAIN: 0}
        self._p = 0.0  # the target size of T1
        self._c = 0

    def admit(self, entry: Entry) -> None:
        entry.queue = _ONCE
        if entry.key in self._b1:
            # Case II: x in B1. p = min(p + max(1, |B2|/|B1|), c); x moves to T2.
            self._p = min(self._p + max(1.0, len(self._b2) / len(self._b1)), self._c)
            del self._b1[entry.key]
            entry.queue = _AGAIN
        elif entry.key in self._b2:
            # Case III: x in B2. p = max(p - max(1, |B1|/|B2|), 0); x moves to T2.
            self._p = max(self._p - max(1.0, len(self._b1) / len(self._b2)), 0.0)
            del self._b2[entry.key]
            entry.queue = _AGAIN
        # Case IV: x in none of the lists goes to T1; `_trim` deletes the LRU ghosts.
        self._size[entry.queue] += 1
        self._c = max(self._c, self._size[_ONCE] + self._size[_AGAIN])
        self._trim()

    def use(self, entry: Entry) -> None:
        # Case I: x in T1 or T2. x moves to the MRU end of T2, once it is offered.
        self.set_aside(entry)
        self._size[entry.queue] -= 1
        self._size[_AGAIN] += 1
        entry.queue = _AGAIN

    def offer(self, entry: Entry) -> None:
        self._list(entry).append(entry)

    def set_aside(self, entry: Entry) -> None:
        self._list(entry).discard(entry)

    def back(self, entry: Entry) -> None:
        self._list(entry).put_first(entry)

    def pick(self) -> Entry | None:
        # REPLACE: the LRU of T1 where |T1| > p, else the LRU of T2.
        if self._t1 and (self._size[_ONCE] > self._p or not self._t2):
            return self._t1.first()
        return self._t2.first()

    def forget(self, entry: Entry, evicted: bool) -> None:
        self._list(entry).discard(entry)
        self._size[entry.queue] -= 1
        if evicted:  # REPLACE: the victim's key becomes the MRU of its ghost list.
            (self._b1 if entry.queue == _ONCE else self._b2)[entry.key] = None
        self._trim()

    def _trim(self) -> None:
        """Case IV's deletions, as the invariants of figure 1."""
        once, again = self._size[_ONCE], self._size[_AGAIN]
        while self._b1 and once + len(self._b1) > self._c:
            self._b1.popitem(last=False)
        while self._b2 and once + again + len(self._b1) + len(self._b2) > 2 * self._c:
            self._b2.popitem(last=False)

    def _list(self, entry: Entry) -> Queue:
        return self._t1 if entry.queue == _ONCE else self._t2

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        once, again = self._size[_ONCE], self._size[_AGAIN]
        assert {*self._t1, *self._t2} == set(candidates), "T1 and T2 do not hold the candidates"
        assert len(self._t1) <= once, f"|T1| is {once}, {len(self._t1)} are candidates"
        assert len(self._t2) <= again, f"|T2| is {again}, {len(self._t2)} are candidates"
        assert once + len(self._b1) <= self._c or not self._b1, f"|T1| + |B1| passes c = {self._c}"
        assert once + again + len(self._b1) + len(self._b2) <= 2 * self._c, f"more than 2c = {2 * self._c} keys"
        assert not self._b1.keys() & self._b2.keys(), "a key is a ghost twice"
        assert not {entry.key for entry in (*self._t1, *self._t2)} & (self._b1.keys() | self._b2.keys()), "a live ghost"
        assert 0 <= self._p <= self._c, f"p = {self._p}, c = {self._c}"
