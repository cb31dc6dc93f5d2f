"""Who is least likely to be used soon, by class: how often it was used, how far its conversation had come, whether it
is the last, partly filled block. What each class is worth at each age is learned online (`reuse_model`).

Wins where sessions end: most of what a chat leaves behind is never used again, and the class tells which. Needs a few
thousand uses to learn; until then it is LRU.

Invariants: an entry lies in the queue of its class (`entry.queue`); every key that is cached or remembered has at most
one running wait, whose epoch is `entry.note` (0: none); ghosts are at most `_GHOSTS_PER_ENTRY` times the most entries
held.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from ktransformer2.cache.replacement.policy import Clock, Entry, Key, Queue
from ktransformer2.cache.replacement.reuse_model import BIN_STARTS_S, ReuseModel, age_bin

_HIT_CLASS = (0, 1, 2, 3, 3, 4, 4, 4, 5)  # by hits; more are the last class
_NUM_HIT_CLASSES = _HIT_CLASS[-1] + 1
_NUM_TURN_CLASSES = 4
_KINDS = tuple(
    tuple(_NUM_HIT_CLASSES * turn + hit_class for hit_class in _HIT_CLASS) for turn in range(_NUM_TURN_CLASSES)
)
_LAST_HITS, _LAST_TURN = len(_HIT_CLASS) - 1, _NUM_TURN_CLASSES - 1
_PARTIAL = _NUM_HIT_CLASSES * _NUM_TURN_CLASSES
_SAID_OVER = _PARTIAL + 1  # added to the class of what callers say is over
NUM_CLASSES = 2 * _SAID_OVER
# Few hits late in a conversation: its tail. What is used together then leaves tail first.
_DEPTHS = (_PARTIAL, *sorted(range(_PARTIAL), key=lambda kind: (kind % _NUM_HIT_CLASSES, -kind)))
_DEEPEST_FIRST = (*(kind + _SAID_OVER for kind in _DEPTHS), *_DEPTHS)
_AGES = 1e12  # seconds: by recency, what is said to be over counts as used before all else
_GHOSTS_PER_ENTRY = 8
USES_PER_FIT = 4096
_HALF_LIFE_FITS = 32.0
_PICKS_PER_LOOK = 64


def kind_of(entry: Entry) -> int:
    """The class of an entry when it is let go."""
    hits, turn = entry.hits, entry.turn
    kind = _KINDS[turn if turn < _LAST_TURN else _LAST_TURN][hits if hits < _LAST_HITS else _LAST_HITS]
    if not entry.full:
        kind = _PARTIAL
    return kind + _SAID_OVER if entry.over else kind


class HazardOrder:
    """The order alone, under a model that somebody else teaches: a queue by last use for each class; the class whose
    oldest is worth least gives the victim. `by_recency`: its last use is all an entry is worth, which is LRU."""

    weighs_hints = True

    def __init__(self, clock: Clock, model: ReuseModel, *, by_recency: bool = False) -> None:
        self._clock = clock
        self.model = model
        self.by_recency = by_recency
        self._queues = [Queue() for _ in range(NUM_CLASSES)]
        # Which class gives victims, up to which last use, for how many picks at most.
        self._kind, self._until, self._picks_left = 0, 0.0, 0

    def admit(self, entry: Entry) -> None:
        """Nothing is known of it before it is offered."""

    def use(self, entry: Entry) -> None:
        self._queues[entry.queue].pop(entry, None)

    def offer(self, entry: Entry) -> None:
        entry.queue = kind = kind_of(entry)
        self._queues[kind][entry] = None

    def set_aside(self, entry: Entry) -> None:
        self._queues[entry.queue].discard(entry)

    def back(self, entry: Entry) -> None:
        entry.queue = kind_of(entry)  # it may have been called over meanwhile
        self._queues[entry.queue].put_first(entry)

    def pick(self) -> Entry | None:
        if self._picks_left > 0:
            self._picks_left -= 1
            for entry in self._queues[self._kind]:
                if entry.used_at <= self._until:
                    return entry
                break
        return self._look()

    def _look(self) -> Entry | None:
        """The oldest of the class whose oldest is worth least. Of equals the one that likely lies deepest."""
        best: Entry | None = None
        least = second = float("inf")
        now, by_recency, worths = self._clock(), self.by_recency, self.model.worth
        for kind in _DEEPEST_FIRST:
            for entry in self._queues[kind]:
                worth = entry.used_at - _AGES * entry.over if by_recency else worths[kind][age_bin(now - entry.used_at)]
                if worth < least:
                    best, least, second = entry, worth, least
                elif worth < second:
                    second = worth
                break
        if best is None:
            return None
        self._kind, self._picks_left = best.queue, _PICKS_PER_LOOK
        if by_recency:
            self._until = second + _AGES * best.over
        else:  # as far as younger ones are worth no more than the second
            number = age_bin(now - best.used_at)
            while number and worths[best.queue][number - 1] <= second:
                number -= 1
            self._until = now - BIN_STARTS_S[number]
        return best

    def forget(self, entry: Entry, evicted: bool) -> None:
        self._queues[entry.queue].pop(entry, None)

    def demote(self, entry: Entry) -> None:
        del self._queues[entry.queue][entry]
        entry.queue = kind_of(entry)
        self._queues[entry.queue].append(entry)

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        assert {entry for queue in self._queues for entry in queue} == set(candidates), "not the candidates"
        for kind, queue in enumerate(self._queues):
            assert all(entry.queue == kind == kind_of(entry) for entry in queue), f"a stranger in class {kind}"


class Hazard(HazardOrder):
    """The order, and what teaches its model: every wait of what is cached, and of keys that have left.

    The calls `_sampled_*` hear of the entries of sampled sessions, those below `_sampled_below`, here of none: one test
    in place costs less than an override around every call.
    """

    def __init__(self, clock: Clock, uses_per_fit: int = USES_PER_FIT) -> None:
        super().__init__(clock, ReuseModel(NUM_CLASSES, _HALF_LIFE_FITS), by_recency=True)
        self._has_learned = False
        self._ghosts: OrderedDict[Key, Entry] = OrderedDict()  # as they were when they left
        self._sampled_below = 0
        self._num_admitted = self._num_entries = self._most_entries = 0
        self._uses_per_fit, self._uses_since_fit = uses_per_fit, 0

    def admit(self, entry: Entry) -> None:
        self._num_admitted += 1
        self._num_entries += 1
        if self._num_entries > self._most_entries:
            self._most_entries = self._num_entries
        ghost = self._ghosts.pop(entry.key, None)
        if ghost is not None:
            entry.hits, entry.turn = ghost.hits + 1, ghost.turn
            self.model.used(ghost.queue, ghost.note, self._clock() - ghost.used_at)
        if entry.session < self._sampled_below:
            self._sampled_admit(entry)

    def use(self, entry: Entry) -> None:
        queue = self._queues[entry.queue]
        if entry in queue:  # `Bands` may have kept it in a band of its own instead
            del queue[entry]
        if entry.note:
            self.model.used(entry.queue, entry.note, self._clock() - entry.used_at)
            entry.note = 0
        if entry.session < self._sampled_below:
            self._sampled_use(entry)

    def offer(self, entry: Entry) -> None:
        model = self.model
        if entry.note:  # it was pinned meanwhile: nobody knows when it would have been used
            model.lost(entry.queue, entry.note, 0.0)
        entry.queue = kind = kind_of(entry)
        self._queues[kind][entry] = None
        entry.note = model.epoch
        model.newest[kind] += 1
        self._uses_since_fit += 1
        if self._uses_since_fit >= self._uses_per_fit:
            self._learn(entry.used_at)
        if entry.session < self._sampled_below:
            self._sampled_offer(entry)

    def _learn(self, now: float) -> None:
        self._uses_since_fit = self._picks_left = 0
        self.model.fit(now)
        if not self._has_learned:
            self._has_learned, self.by_recency = True, False

    def forget(self, entry: Entry, evicted: bool) -> None:
        self._num_entries -= 1
        queue = self._queues[entry.queue]
        if entry in queue:
            del queue[entry]
        if not evicted:
            self._unlearn(entry)
        elif entry.note:
            ghosts = self._ghosts
            ghosts[entry.key] = entry
            if len(ghosts) > _GHOSTS_PER_ENTRY * self._most_entries:
                _, ghost = ghosts.popitem(last=False)
                self.model.lost(ghost.queue, ghost.note, self._clock() - ghost.used_at)

    def _unlearn(self, entry: Entry) -> None:
        """It has left, but not for want of room: its wait says nothing of it from now on."""
        if entry.note:
            self.model.lost(entry.queue, entry.note, self._clock() - entry.used_at)

    def _sampled_admit(self, entry: Entry) -> None:
        """An entry of a sampled session was admitted."""

    def _sampled_use(self, entry: Entry) -> None:
        """An entry of a sampled session was used."""

    def _sampled_offer(self, entry: Entry) -> None:
        """An entry of a sampled session was offered."""

    def back(self, entry: Entry) -> None:
        before = entry.queue
        super().back(entry)
        if entry.note:
            self.model.reclassify(before, entry.queue, entry.note)

    def demote(self, entry: Entry) -> None:
        before = entry.queue
        super().demote(entry)
        if entry.note:
            self.model.reclassify(before, entry.queue, entry.note)

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        candidates = list(candidates)
        super().check_integrity(candidates)
        assert len(self._ghosts) <= _GHOSTS_PER_ENTRY * self._most_entries, f"{len(self._ghosts)} ghosts"
        assert not {entry.key for entry in candidates} & self._ghosts.keys(), "a cached key is remembered as gone"
        known = (*candidates, *self._ghosts.values())
        self.model.check_integrity(Counter((entry.queue, entry.note) for entry in known if entry.note))
