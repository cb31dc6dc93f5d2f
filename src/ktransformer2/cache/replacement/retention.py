"""Who may leave at all: the tree of cached blocks, who uses them, what is pinned, what has idled too long.

Stands between a cache and any `ReplacementPolicy`. A policy only orders; here is decided that leaves go before roots,
that nothing in use and nothing pinned goes, and that pins stay under their cap. Knows no bytes but their number.

Invariants: a victim has no user, no pin and no child; `pinned_bytes` never passes the cap; every entry without users is
a candidate of the policy or set aside, and one set aside comes back when its last child leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ktransformer2.cache.replacement.deadlines import Deadlines
from ktransformer2.cache.replacement.policy import Clock, Entry, Key, ReplacementPolicy, spread

Worth = Callable[[Entry], float]
_CONTENDERS = 8  # among so many next victims worth decides
_MANY_CHILDREN = 4  # what so many different texts continue is no conversation's own


class Retention:
    """Entries under one policy.

    `pin_limit_bytes` caps what can be pinned. `ttl_s`: an entry that nobody used for so long is `expired`; None: never.
    `worth`: seconds a byte that it saves to have an entry here when it is used; None: all are worth the same.
    """

    def __init__(
        self,
        policy: ReplacementPolicy,
        clock: Clock,
        *,
        pin_limit_bytes: int = 0,
        ttl_s: float | None = None,
    ) -> None:
        self.policy = policy
        self.pinned_bytes = 0
        self._clock = clock
        self.worth: Worth | None = None
        self._pin_limit_bytes = pin_limit_bytes
        self._ttl_s = ttl_s
        self._has_ttl = ttl_s is not None  # or an entry has one of its own
        self._entries: dict[Key, Entry] = {}
        self.pins: dict[Entry, int] = {}  # how often each is pinned
        self._orphans: dict[Key, int] = {}  # how many entries hold a parent that is not there, by its key
        self._idle = Deadlines()
        self._own_ttl_s: dict[Entry, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    # --- the life of an entry

    def admit(
        self, key: Key, parent: Key | None, num_bytes: int, *, full: bool = True, holds_parent: bool = True
    ) -> Entry:
        """A new block, held by the one that made it; parents come before their children.

        `full`: all its rows are there. `holds_parent=False`: the parent may leave first (a window has passed it).
        """
        entries = self._entries
        entry = Entry(key, parent, num_bytes, full)
        above = None if parent is None else entries.get(parent)
        if above is None:
            entry.session = spread(key)
        else:
            entry.turn = above.turn + 1 if above.hits else above.turn
            entry.session = above.session if above.children < _MANY_CHILDREN else spread(key)
        if not holds_parent:
            entry.holds_parent = False
        elif above is not None:
            above.children += 1
        elif parent is not None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        if self._orphans:
            entry.children = self._orphans.pop(key, 0)
        assert key not in entries, f"{key!r} is cached already"
        entries[key] = entry
        self.policy.admit(entry)
        return entry

    def use(self, entry: Entry) -> None:
        """It was found: one more holds it."""
        if entry.users == 0:
            self.policy.use(entry)
        entry.users += 1
        entry.hits += 1

    def release(self, entry: Entry) -> None:
        """One less holds it. A chain is released tail first, so that a parent is never older than its child."""
        assert entry.users > 0, f"{entry} has no user to lose"
        entry.users -= 1
        if entry.users == 0:
            entry.used_at = self._clock()
            self.policy.offer(entry)
            entry.aside = False
            if self._has_ttl:
                self._start_idling(entry)

    def victim(self, is_spared: Callable[[Entry], bool] | None = None) -> Entry | None:
        """What leaves next, left in place. None: nothing can go, or all that can is spared.

        With `worth` the least worthy of the next few goes; where all are worth the same, the policy's own choice. What
        callers said of entries is not weighed against it: only those of the first one's band are looked at.
        """
        if self.worth is None and is_spared is None:
            return self._next()
        passed: list[Entry] = []
        contenders: list[Entry] = []
        while len(contenders) < (_CONTENDERS if self.worth else 1):
            entry = self._next()
            if entry is None or (contenders and entry.band != contenders[0].band):
                break
            if is_spared is None or not is_spared(entry):
                contenders.append(entry)
            self.policy.set_aside(entry)
            passed.append(entry)
        for entry in reversed(passed):
            self.policy.back(entry)
        return min(contenders, key=self.worth, default=None) if self.worth else next(iter(contenders), None)

    def _next(self) -> Entry | None:
        while (entry := self.policy.pick()) is not None:
            if not entry.users and not entry.children:
                return entry
            entry.aside = True
            self.policy.set_aside(entry)
        return None

    def expired(self) -> Entry | None:
        """An entry that can go and that nobody used for its time to live. None: there is none."""
        for entry in self._idle.due(self._clock()):
            if self._can_go(entry):
                return entry
            self._idle.stop(entry)  # it starts again when it is released, or when its last child leaves
        return None

    def evict(self, entry: Entry) -> None:
        """It leaves for want of room or for its age; its key may be remembered."""
        assert self._can_go(entry), f"{entry} cannot leave"
        self._remove(entry, True)

    def forget(self, entry: Entry) -> None:
        """Its content is gone or changed, for reasons of the cache: as if it had never been."""
        if self.pins.pop(entry, 0):
            self.pinned_bytes -= entry.num_bytes
        if entry.children:
            self._orphans[entry.key] = entry.children
        self._remove(entry, False)

    def _remove(self, entry: Entry, evicted: bool) -> None:
        del self._entries[entry.key]
        self.policy.forget(entry, evicted)
        if self._has_ttl:
            self._idle.stop(entry)
            self._own_ttl_s.pop(entry, None)
        if entry.parent is None or not entry.holds_parent:
            return
        parent = self._entries.get(entry.parent)
        if parent is None:
            self._lose_orphan(entry.parent)
            return
        parent.children -= 1
        if not parent.children and not parent.users:
            if parent.aside:
                parent.aside = False
                self.policy.back(parent)
            if self._has_ttl and parent not in self._idle:
                self._start_idling(parent)

    def _lose_orphan(self, parent: Key) -> None:
        self._orphans[parent] -= 1
        if not self._orphans[parent]:
            del self._orphans[parent]

    def _can_go(self, entry: Entry) -> bool:
        return not entry.users and not entry.children

    # --- pins and times to live

    def pin(self, entries: Sequence[Entry]) -> bool:
        """None of these leaves until it is unpinned. False: the cap would be passed, and nothing has changed.

        Pin a chain whole: a parent stays anyway while a pinned child does, but only what is pinned counts for the cap.
        """
        more = sum(entry.num_bytes for entry in set(entries) if entry not in self.pins)
        if self.pinned_bytes + more > self._pin_limit_bytes:
            return False
        self.pinned_bytes += more
        for entry in entries:
            if entry.users == 0:
                entry.aside = True
                self.policy.set_aside(entry)
            entry.users += 1
            self.pins[entry] = self.pins.get(entry, 0) + 1
        return True

    def unpin(self, entries: Sequence[Entry]) -> None:
        """One pin less on each; give a chain tail first. What nobody holds any more counts as used just now."""
        for entry in entries:
            assert entry in self.pins, f"{entry} is not pinned"
            self.pins[entry] -= 1
            if not self.pins[entry]:
                del self.pins[entry]
                self.pinned_bytes -= entry.num_bytes
            self.release(entry)

    def live(self, entry: Entry, ttl_s: float) -> None:
        """This entry expires `ttl_s` after its last use, whatever the rule for all is. Each use renews it."""
        self._has_ttl = True
        self._own_ttl_s[entry] = ttl_s
        if entry.users == 0:
            self._start_idling(entry)

    def _start_idling(self, entry: Entry) -> None:
        ttl_s = self._own_ttl_s.get(entry, self._ttl_s)
        if ttl_s is not None:
            self._idle.start(entry, entry.used_at, ttl_s)

    # --- checks

    def check_integrity(self) -> None:
        """Recount everything; an assertion names what differs. O(entries)."""
        children: dict[Key, int] = {}
        pinned = 0
        for key, entry in self._entries.items():
            assert entry.key == key, f"{entry} under the key {key!r}"
            assert entry.users >= self.pins.get(entry, 0), f"{entry} has {self.pins[entry]} pins"
            pinned += entry.num_bytes if entry in self.pins else 0
            if entry.holds_parent and entry.parent is not None:
                children[entry.parent] = children.get(entry.parent, 0) + 1
        for entry in self:
            assert entry.children == children.pop(entry.key, 0), f"{entry} has another number of children"
        assert children == self._orphans, "the orphans do not add up"
        assert pinned == self.pinned_bytes <= self._pin_limit_bytes, f"{pinned} pinned, {self.pinned_bytes} counted"
        for entry in self:
            stuck = entry.aside and self._can_go(entry)
            assert not stuck, f"{entry} is set aside for nothing"
        self.policy.check_integrity([entry for entry in self if entry.users == 0 and not entry.aside])
