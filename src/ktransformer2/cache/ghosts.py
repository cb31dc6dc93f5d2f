"""What has left: the keys of evicted blocks, with when and why. Knows no block and no token.

Bounded: two generations of keys. A full young generation becomes the old one, and the old one is forgotten. So at least
the newest half of `capacity` evictions are remembered, and never more than `capacity`; a key takes some 200 bytes.
"""

from __future__ import annotations

from typing import NamedTuple


class Eviction(NamedTuple):
    """When a block left, by the cache's clock, and for what: room, share, idle or clear."""

    at_s: float
    cause: str


class Ghosts:
    """Prefix hash -> its newest eviction."""

    def __init__(self, capacity: int) -> None:
        assert capacity >= 2, f"capacity of {capacity} keys"
        self.capacity = capacity
        self._young: dict[bytes, Eviction] = {}
        self._old: dict[bytes, Eviction] = {}

    def __len__(self) -> int:
        """Keys held; one that left in both generations counts twice."""
        return len(self._young) + len(self._old)

    def add(self, key: bytes, eviction: Eviction) -> None:
        if len(self._young) >= self.capacity // 2:
            self._young, self._old = {}, self._young
        self._young[key] = eviction

    def get(self, key: bytes) -> Eviction | None:
        """Also of a block that has come back since."""
        return self._young.get(key) or self._old.get(key)
