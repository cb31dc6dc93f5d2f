"""A tier in a dictionary that does what it is told: slow, failing, short, forgetful, or with a filter that says yes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from ktransformer2.tiers.tier import ROOT, StoredBlock, TierStats


class MemoryTier:
    """`gate`: while it is not set, `put` and `get` wait; `entered`: one of them was called.

    `lasts`: as if it outlived the process; a host does not. `limit_bytes` is only told of. `raises`, `fails`: names of
    calls that do. `most`: a short read. `says_yes`: a filter without use. `transfers`: the keys of each `put` and
    `get`, in order.
    """

    def __init__(self, name: str = "memory", limit_blocks: int = 10**9) -> None:
        self.name, self.limit_blocks, self.lasts = name, limit_blocks, name != "host"
        self.limit_bytes = 0
        self.blocks: dict[bytes, StoredBlock] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.raises: set[str] = set()
        self.fails: set[str] = set()
        self.most = 10**9
        self.says_yes = False
        self.is_closed = False
        self.transfers: list[tuple[str, list[bytes]]] = []

    def may_hold(self, key: bytes) -> bool:
        if "may_hold" in self.raises:
            raise OSError("the filter is gone")
        return self.says_yes or key in self.blocks

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        self._begin("put", [block.key for block in blocks])
        if "put" in self.fails:
            return 0
        return sum(self._put(block) for block in blocks)

    def _put(self, block: StoredBlock) -> bool:
        has_parent = block.parent == ROOT or not block.holds_parent or block.parent in self.blocks
        if block.key in self.blocks or not has_parent or len(self.blocks) >= self.limit_blocks:
            return block.key in self.blocks
        self.blocks[block.key] = replace(block, payload=bytes(block.payload))
        return True

    def get(self, keys: Sequence[bytes]) -> list[bytearray]:
        self._begin("get", list(keys))
        payloads: list[bytearray] = []
        for key in keys[: self.most]:
            if key not in self.blocks or "get" in self.fails:
                break
            payloads.append(bytearray(self.blocks[key].payload))
        return payloads

    def _begin(self, call: str, keys: list[bytes]) -> None:
        self.entered.set()
        self.gate.wait()
        self.transfers.append((call, keys))
        if call in self.raises:
            raise OSError(f"{call} is gone")

    def forget(self, key: bytes) -> None:
        """Lose a block and what continues it, as an eviction by somebody else does."""
        self.blocks.pop(key, None)
        for child in [each.key for each in self.blocks.values() if each.parent == key and each.holds_parent]:
            self.forget(child)

    def clear(self) -> int:
        freed = sum(len(block.payload) for block in self.blocks.values())
        self.blocks.clear()
        return freed

    def stats(self) -> TierStats:
        num_bytes = sum(len(block.payload) for block in list(self.blocks.values()))
        return TierStats(self.name, len(self.blocks), num_bytes, self.limit_bytes)

    def close(self) -> None:
        self.is_closed = True


def block(number: int, parent: int | None = None, num_bytes: int = 64) -> StoredBlock:
    """A block of one layer group, by number."""
    return StoredBlock(key(number), ROOT if parent is None else key(parent), 16, bytes([number]) * num_bytes)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + b"\0"
