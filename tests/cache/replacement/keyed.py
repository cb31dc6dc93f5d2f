"""A cache of keys with nothing above each other, for traces written by hand."""

from __future__ import annotations

from ktransformer2.cache.replacement.policy import Entry, Key, ReplacementPolicy
from ktransformer2.cache.replacement.retention import Retention


class Keyed:
    """At most `capacity` keys under one policy."""

    def __init__(self, policy: ReplacementPolicy, capacity: int) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.retention = Retention(policy, lambda: self.now)

    def entry(self, key: Key) -> Entry:
        entry = self.retention.get(key)
        assert entry is not None, f"{key!r} is not cached"
        return entry

    def touch(self, *keys: Key) -> None:
        """One request after another, each for one key, which is let go at once."""
        for key in keys:
            entry = self.retention.get(key)
            if entry is None:
                entry = self.admit(key)
            else:
                self.retention.use(entry)
            self.retention.release(entry)
            self.retention.check_integrity()

    def admit(self, key: Key) -> Entry:
        """A new key, held by one."""
        if len(self.retention) == self.capacity:
            self.evict()
        return self.retention.admit(key, None, 1)

    def evict(self) -> Key:
        """Whoever goes next."""
        victim = self.retention.victim()
        assert victim is not None, "nothing can leave"
        self.retention.evict(victim)
        return victim.key
