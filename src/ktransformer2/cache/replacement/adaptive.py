"""Chooses between recency and learned hazards by what each would have done: two shadow caches over sampled sessions.

A shadow is a small cache of keys that sees only some sessions, whole, in one order; its capacity is the cache's times
the share of newcomers it sees. The order whose shadow has had more hits lately rules the cache, and since both read the
same queues, changing it costs nothing.

Sampling whole sessions keeps chains whole: sampled block by block, leaves-first would mean nothing.
Source: spatial sampling as in Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015, by session here.

Invariant: what a shadow holds in use, the cache holds in use.
"""

from __future__ import annotations

from collections.abc import Iterable

from ktransformer2.cache.replacement.hazard import USES_PER_FIT, Hazard, HazardOrder
from ktransformer2.cache.replacement.lru import LRU
from ktransformer2.cache.replacement.policy import Clock, Entry, Key, ReplacementPolicy
from ktransformer2.cache.replacement.retention import Retention

_LEAST_SHADOW_ENTRIES = 512  # also the sampled touches between two looks
_ALL_SESSIONS = 2**32  # `Entry.session` is less
_MOST_SAMPLING = 64
_KEEP = 0.9  # of the counts, from look to look
_MARGIN = 1.02  # recency must be so much better


class Shadow:
    """What an order would keep, in keys."""

    def __init__(self, order: ReplacementPolicy, clock: Clock) -> None:
        self._order = order
        self._retention = Retention(order, clock)
        self.hits = 0.0

    def touch(self, entry: Entry, capacity: int) -> None:
        """The cache used or admitted `entry`. What does not fit beside entries in use is not kept."""
        retention, shade = self._retention, self._retention.get(entry.key)
        if shade is not None:
            self.hits += 1.0
            retention.use(shade)
            shade.over = False
            return
        while len(retention) >= capacity:
            victim = retention.victim()
            if victim is None:
                return
            retention.evict(victim)
        shade = retention.admit(entry.key, entry.parent, 1, full=entry.full)
        shade.hits, shade.turn = entry.hits, entry.turn

    def let_go(self, key: Key) -> None:
        """The cache's last user of `key` let go."""
        shade = self._retention.get(key)
        if shade is not None and shade.users:
            self._retention.release(shade)

    def demote(self, key: Key) -> None:
        """The cache was told that `key` is over."""
        shade = self._retention.get(key)
        if shade is None or shade.over:
            return
        shade.over = True
        if shade.users or shade.aside:
            return
        if self._order.weighs_hints:
            self._order.demote(shade)
        else:
            self._order.set_aside(shade)
            self._order.back(shade)

    def let_all_go(self) -> None:
        """Fewer sessions are sampled from now on: what is left of the others ages and goes."""
        for shade in self._retention:
            if shade.users:
                self._retention.release(shade)

    def forget(self, key: Key) -> None:
        shade = self._retention.get(key)
        if shade is not None:
            self._retention.forget(shade)

    def check_integrity(self) -> None:
        self._retention.check_integrity()


class Adaptive(Hazard):
    """`by_recency` or not, whichever shadow does better."""

    def __init__(
        self, clock: Clock, uses_per_fit: int = USES_PER_FIT, least_shadow_entries: int = _LEAST_SHADOW_ENTRIES
    ) -> None:
        super().__init__(clock, uses_per_fit)
        # Indexed by `by_recency`.
        self._shadows = (Shadow(HazardOrder(clock, self.model), clock), Shadow(LRU(), clock))
        self._sampled_below = _ALL_SESSIONS
        self._capacity = self._least_capacity = least_shadow_entries
        self._newcomers = self._sampled_newcomers = 1.0
        self._touches = self._admitted_before = 0

    def _unlearn(self, entry: Entry) -> None:
        super()._unlearn(entry)
        for shadow in self._shadows:
            shadow.forget(entry.key)

    def demote(self, entry: Entry) -> None:
        super().demote(entry)
        for shadow in self._shadows:
            shadow.demote(entry.key)

    def _sampled_admit(self, entry: Entry) -> None:
        self._sampled_newcomers += 1.0
        self._sampled_use(entry)

    def _sampled_use(self, entry: Entry) -> None:
        self._touches += 1
        if self._touches >= self._least_capacity:
            self._choose()
            if entry.session >= self._sampled_below:
                return
        for shadow in self._shadows:
            shadow.touch(entry, self._capacity)

    def _sampled_offer(self, entry: Entry) -> None:
        for shadow in self._shadows:
            shadow.let_go(entry.key)

    def _choose(self) -> None:
        """Rule by the better order, and fit the shadows to the cache as it is now."""
        self._touches = 0
        ruling, other = self._shadows[self.by_recency], self._shadows[not self.by_recency]
        if other.hits > (1.0 if self.by_recency else _MARGIN) * ruling.hits:
            self.by_recency = not self.by_recency
            self._picks_left = 0
        for shadow in self._shadows:
            shadow.hits *= _KEEP
        self._newcomers += self._num_admitted - self._admitted_before
        self._admitted_before = self._num_admitted
        if self._capacity >= 2 * self._least_capacity and self._sampled_below > _ALL_SESSIONS // _MOST_SAMPLING:
            self._sampled_below //= 2
            self._sampled_newcomers /= 2
            for shadow in self._shadows:
                shadow.let_all_go()
        self._capacity = max(1, round(self._num_entries * self._sampled_newcomers / self._newcomers))
        self._newcomers *= _KEEP
        self._sampled_newcomers *= _KEEP

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        super().check_integrity(candidates)
        for shadow in self._shadows:
            shadow.check_integrity()
