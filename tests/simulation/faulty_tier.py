"""A tier with every fault that a disk or a server may have, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ktransformer2.tiers.tier import StoredBlock
from tests.tiers.memory_tier import MemoryTier


@dataclass
class Weather:
    """How likely each fault is, from 0 to 1; drawn anew now and then, so that there are good times and bad ones."""

    raises: float = 0.0
    refuses: float = 0.0  # a put that keeps nothing, or only some
    misses: float = 0.0  # a get that breaks off: corrupt, truncated, swapped, gone
    forgets: float = 0.0  # somebody else evicts
    lies: float = 0.0  # a filter that says yes

    @classmethod
    def draw(cls, rng: random.Random) -> Weather:
        if rng.random() < 0.4:
            return cls()
        return cls(*(rng.choice((0.0, 0.0, 0.05, 0.5, 1.0)) for _ in range(5)))


class FaultyTier(MemoryTier):
    """What it does give is whole: telling a broken block from a whole one is each tier's own business, and tests'."""

    def __init__(self, name: str, rng: random.Random, limit_blocks: int) -> None:
        super().__init__(name, limit_blocks)
        self.weather = Weather()
        self._rng = rng

    def may_hold(self, key: bytes) -> bool:
        return self._rng.random() < self.weather.lies or super().may_hold(key)

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        self._suffer()
        if self._rng.random() < self.weather.refuses:
            blocks = blocks[: self._rng.randrange(len(blocks) + 1)] if self._rng.random() < 0.5 else ()
        return super().put(blocks)

    def get(self, keys: Sequence[bytes]) -> list[bytearray]:
        self._suffer()
        found = super().get(keys)
        if found and self._rng.random() < self.weather.misses:
            self.forget(keys[self._rng.randrange(len(found))])
            found = found[: self._rng.randrange(len(found))]
        return found

    def _suffer(self) -> None:
        self.transfers.clear()
        if self.blocks and self._rng.random() < self.weather.forgets:
            self.forget(self._rng.choice(list(self.blocks)))
        if self._rng.random() < self.weather.raises:
            raise OSError("it is gone")

    def check_integrity(self) -> None:
        """Prefix-closed, and no more than its limit."""
        assert len(self.blocks) <= self.limit_blocks
        for block in self.blocks.values():
            held = block.parent == b"" or not block.holds_parent or block.parent in self.blocks
            assert held, f"{block.key.hex()[:8]} has lost its parent"
