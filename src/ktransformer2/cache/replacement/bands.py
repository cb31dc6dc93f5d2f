"""What the callers know: priorities and signs of life. A few bands around a policy; inside the middle band it rules.

    over      `ended`, `superseded`: goes before anything else, until a use proves the hint wrong; a policy that weighs
              hints learns instead how often they are right, and keeps its own order
    -n        low priority
    0         the policy's own order
    +n        high priority: goes when nothing below it can
    waiting   kept while a tool or a person is awaited, for at most the time given

Outside the middle band an entry goes by its last use. Hints are advice: a wrong one costs a miss, never an answer.

Invariant: `entry.band` says where an entry is; the policy within hears of every use, wherever the entry is.
"""

from __future__ import annotations

from collections.abc import Iterable

from ktransformer2.cache.replacement.deadlines import Deadlines
from ktransformer2.cache.replacement.policy import Clock, Entry, Queue, ReplacementPolicy

MAX_PRIORITY = 100
_OVER, _OWN, _WAITING = -MAX_PRIORITY - 1, 0, MAX_PRIORITY + 1


class Bands:
    """A policy within bands."""

    weighs_hints = True

    def __init__(self, policy: ReplacementPolicy, clock: Clock) -> None:
        self.policy = policy
        self._clock = clock
        self._bands: dict[int, Queue] = {}
        self._priorities: dict[Entry, int] = {}
        self._waiting = Deadlines()

    # --- what callers say

    def ended(self, entries: Iterable[Entry]) -> None:
        """The session that alone used these is over."""
        for entry in entries:
            self._waiting.stop(entry)
            if entry.over:
                continue
            entry.over = True
            if not self.policy.weighs_hints:
                self._move(entry, _OVER)
            elif entry.band not in (_OWN, _WAITING):
                continue  # a priority is an order, a hint is not
            elif entry.band == _WAITING:
                self._move(entry, _OWN)
            elif entry.users == 0 and not entry.aside:
                self.policy.demote(entry)

    superseded = ended  # the session went on another way, or a text was edited: as little is left to hope for

    def waiting(self, entries: Iterable[Entry], ttl_s: float) -> None:
        """Their session will be back within `ttl_s`: a tool runs, a person types. It is not over, then."""
        now = self._clock()
        for entry in entries:
            self._waiting.start(entry, now, ttl_s)
            self._move(entry, _WAITING)
            entry.over = False

    def prioritise(self, entries: Iterable[Entry], priority: int) -> None:
        """-MAX_PRIORITY..MAX_PRIORITY; 0 is the policy's own order."""
        assert abs(priority) <= MAX_PRIORITY, f"priority {priority}, allowed: up to {MAX_PRIORITY} either way"
        for entry in entries:
            if priority:
                self._priorities[entry] = priority
            else:
                self._priorities.pop(entry, None)
            if entry.band not in (_OVER, _WAITING):
                self._move(entry, priority)

    # --- the policy's calls

    def admit(self, entry: Entry) -> None:
        self.policy.admit(entry)

    def use(self, entry: Entry) -> None:
        if entry.band:
            self._leave(entry)
            entry.band = self._priorities.get(entry, _OWN)
            self._waiting.stop(entry)
        self.policy.use(entry)
        entry.over = False

    def offer(self, entry: Entry) -> None:
        if entry.band:
            self._band(entry).append(entry)
        else:
            self.policy.offer(entry)

    def set_aside(self, entry: Entry) -> None:
        if entry.band:
            self._leave(entry)
        else:
            self.policy.set_aside(entry)

    def back(self, entry: Entry) -> None:
        if entry.band:
            self._band(entry).put_first(entry)
        else:
            self.policy.back(entry)

    def pick(self) -> Entry | None:
        if self._bands:
            return self._pick_by_band()
        return self.policy.pick()

    def forget(self, entry: Entry, evicted: bool) -> None:
        if entry.band:
            self._leave(entry)
            self._waiting.stop(entry)
        self._priorities.pop(entry, None)
        self.policy.forget(entry, evicted)

    def demote(self, entry: Entry) -> None:
        self.ended((entry,))

    def _pick_by_band(self) -> Entry | None:
        for entry in self._waiting.due(self._clock()):
            self._waiting.stop(entry)
            self._move(entry, self._priorities.get(entry, _OWN))
        levels = sorted(self._bands)
        for level in levels:
            if level < _OWN:
                return self._bands[level].first()
        picked = self.policy.pick()
        return self._bands[levels[0]].first() if picked is None and levels else picked

    # --- moving between bands

    def _move(self, entry: Entry, band: int) -> None:
        """Between bands, in the order of the calls. One in use or set aside only changes its mark."""
        if entry.band == band:
            return
        candidate = entry.users == 0 and not entry.aside
        if candidate:
            self.set_aside(entry)
        elif entry.band == _OWN:
            self.policy.set_aside(entry)  # some keep an entry's place while it is in use
        entry.band = band
        if candidate:
            self.offer(entry)

    def _band(self, entry: Entry) -> Queue:
        band = self._bands.get(entry.band)
        if band is None:
            band = self._bands[entry.band] = Queue()
        return band

    def _leave(self, entry: Entry) -> None:
        band = self._bands.get(entry.band)
        if band is not None and entry in band:
            del band[entry]
            if not band:
                del self._bands[entry.band]

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        candidates = list(candidates)
        held = {entry: level for level, band in self._bands.items() for entry in band}
        assert held.keys() == {entry for entry in candidates if entry.band}, "the bands do not hold their candidates"
        assert all(entry.band == level for entry, level in held.items()), "an entry lies in a band of another mark"
        assert all(self._bands.values()), "an empty band"
        awaited = sum(entry in self._waiting for entry in self._bands.get(_WAITING, ()))
        assert awaited == len(self._bands.get(_WAITING, ())), "an entry waits without an end"
        self.policy.check_integrity([entry for entry in candidates if not entry.band])
