"""Any policy against a naive model: who is cached, who uses, who is pinned; leaves first, within the capacity, never a
block in use or pinned. What LRU evicts is predicted exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ktransformer2.cache.replacement import POLICIES, make_policy
from ktransformer2.cache.replacement.adaptive import Adaptive
from ktransformer2.cache.replacement.bands import Bands
from ktransformer2.cache.replacement.hazard import Hazard
from ktransformer2.cache.replacement.policy import Clock, Entry, ReplacementPolicy
from ktransformer2.cache.replacement.retention import Retention

CAPACITY, PIN_LIMIT = 12, 5
# Texts over a tree of ids: the id of a block names its whole path, as a prefix hash does.
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda turns: [int("1" + "".join(map(str, turns[: n + 1]))) for n in range(len(turns))]
)


def quick_policy(name: str, clock: Clock) -> ReplacementPolicy:
    """A policy that learns from a handful of uses what takes thousands elsewhere, so that a short run gets there."""
    if name == "hazard":
        return Hazard(clock, uses_per_fit=5)
    if name == "adaptive":
        return Adaptive(clock, uses_per_fit=5, least_shadow_entries=2)
    return make_policy(name, clock)


class RetentionMachine(RuleBasedStateMachine):
    """Requests come, overlap, and end; room is made one block at a time."""

    @initialize(name=st.sampled_from(POLICIES), ttl_s=st.sampled_from([None, 5.0]), weighs=st.booleans())
    def open(self, name: str, ttl_s: float | None, weighs: bool) -> None:
        self.name, self.ttl_s, self.now = name, ttl_s, 0.0
        self.bands = Bands(quick_policy(name, self.clock), self.clock)
        self.retention = Retention(self.bands, self.clock, pin_limit_bytes=PIN_LIMIT, ttl_s=ttl_s)
        self.weighs = weighs
        if weighs:
            self.retention.worth = lambda entry: float(entry.key[0] if isinstance(entry.key, bytes) else entry.key % 3)
        self.parents: dict[int, int | None] = {}  # of what is cached
        self.users: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.running: list[list[int]] = []
        self.released: list[int] = []  # in the order of last use
        self.hinted = False

    def clock(self) -> float:
        return self.now

    def entry(self, key: int) -> Entry:
        entry = self.retention.get(key)
        assert entry is not None, f"{key} should be cached"
        return entry

    def leaves(self) -> set[int]:
        parents = set(self.parents.values())
        return {key for key in self.parents if key not in parents and not self.users[key] and not self.pins[key]}

    def evict(self, entry: Entry) -> None:
        assert entry.key in self.leaves()
        self.retention.evict(entry)
        del self.parents[entry.key]
        self.released = [key for key in self.released if key != entry.key]

    @rule(path=PATHS)
    def come(self, path: Sequence[int]) -> None:
        held: list[int] = []
        for key in path:
            if key in self.parents:
                self.retention.use(self.entry(key))
            else:
                if len(self.parents) >= CAPACITY:
                    victim = self.retention.victim()
                    assert (victim is None) == (not self.leaves())
                    if victim is None:
                        break
                    if self.name == "lru" and not self.hinted and not self.weighs:
                        assert victim.key == next(k for k in self.released if k in self.leaves())
                    self.evict(victim)
                self.retention.admit(key, held[-1] if held else None, 1, full=key % 10 != 2)
                self.parents[key] = held[-1] if held else None
            self.users[key] += 1
            held.append(key)
        self.running.append(held)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def go(self, which: int) -> None:
        for key in reversed(self.running.pop(which % len(self.running))):
            self.let_go(key)

    def let_go(self, key: int) -> None:
        self.users[key] -= 1
        self.retention.release(self.entry(key))
        self.note_use(key)

    def note_use(self, key: int) -> None:
        if not self.users[key] and not self.pins[key]:
            self.released = [*(k for k in self.released if k != key), key]

    @rule(path=PATHS)
    def pin(self, path: Sequence[int]) -> None:
        there = [key for key in path if key in self.parents]
        more = sum(not self.pins[key] for key in there)
        fits = sum(count > 0 for count in self.pins.values()) + more <= PIN_LIMIT
        assert self.retention.pin([self.entry(key) for key in there]) == fits
        if fits:
            self.pins.update(there)

    @rule(path=PATHS)
    def unpin(self, path: Sequence[int]) -> None:
        there = [key for key in reversed(path) if self.pins[key]]
        self.retention.unpin([self.entry(key) for key in there])
        for key in there:
            self.pins[key] -= 1
            self.note_use(key)

    @rule(path=PATHS, said=st.sampled_from(["ended", "waiting", "low", "high"]))
    def hint(self, path: Sequence[int], said: str) -> None:
        self.hinted = True
        entries = [self.entry(key) for key in reversed(path) if key in self.parents]
        if said == "ended":
            self.bands.ended(entries)
        elif said == "waiting":
            self.bands.waiting(entries, 3.0)
        else:
            self.bands.prioritise(entries, -1 if said == "low" else 1)

    @precondition(lambda self: any(not self.pins[k] and k not in set(self.parents.values()) for k in self.parents))
    @rule(which=st.integers(0, 99))
    def fill_again(self, which: int) -> None:
        """A block without children loses its content while one sequence at most holds it."""
        loose = [
            key
            for key in self.parents
            if not self.pins[key] and self.users[key] <= 1 and key not in set(self.parents.values())
        ]
        if not loose:
            return
        key = loose[which % len(loose)]
        self.retention.forget(self.entry(key))
        del self.parents[key]
        self.users[key] = 0
        self.running = [[k for k in held if k != key] for held in self.running]
        self.released = [k for k in self.released if k != key]

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        while (entry := self.retention.expired()) is not None:
            assert self.ttl_s is not None
            assert entry.used_at + self.ttl_s < self.now
            self.evict(entry)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "retention"):
            return
        self.retention.check_integrity()
        assert {entry.key for entry in self.retention} == self.parents.keys()
        assert len(self.parents) <= CAPACITY
        assert all(self.entry(key).users == self.users[key] + self.pins[key] for key in self.parents)
        victim = self.retention.victim()
        assert (victim is None) == (not self.leaves())
        assert victim is None or victim.key in self.leaves()

    def teardown(self) -> None:
        if not hasattr(self, "retention"):
            return
        for held in self.running:
            for key in reversed(held):
                self.let_go(key)
        self.retention.unpin([self.entry(key) for key in self.pins.elements()])
        self.pins.clear()
        while (victim := self.retention.victim()) is not None:
            self.evict(victim)
        assert not self.parents, f"{len(self.parents)} blocks never leave"
        self.retention.check_integrity()
