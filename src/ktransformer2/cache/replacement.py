"""Which cached block leaves first: least recently used, leaves before roots. Knows keys and times, no bytes.

A lazy heap: an entry is valid while its block is still unused, still a leaf, and was not used since. O(log n) a call.
Stale entries are thrown out when the heap has doubled: it holds at most 64, or twice the blocks that can be evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from ktransformer2.cache.block import Block

_LEAST_SWEEP = 64


class LeavesFirstLRU:
    """Candidates for eviction in the order of their last use. `is_leaf` is asked at the moment of choice."""

    def __init__(self, is_leaf: Callable[[Block], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[float, int, Block]] = []
        self._ticket = count()
        self._sweep_at = _LEAST_SWEEP

    def offer(self, block: Block) -> None:
        """The block may have become evictable: it lost its last user, or its last child."""
        if not self._evictable(block):
            return
        heapq.heappush(self._heap, (block.last_used, next(self._ticket), block))
        if len(self._heap) >= self._sweep_at:
            valid = {id(entry[2]): entry for entry in self._heap if self._is_valid(entry[0], entry[2])}
            self._heap = sorted(valid.values(), key=lambda entry: entry[:2])
            self._sweep_at = max(_LEAST_SWEEP, 2 * len(self._heap))

    def oldest(self) -> Block | None:
        """The next victim, left in place; None when nothing can go."""
        while self._heap:
            last_used, _, block = self._heap[0]
            if self._is_valid(last_used, block):
                return block
            heapq.heappop(self._heap)
        return None

    def _evictable(self, block: Block) -> bool:
        return block.references == 0 and block.indexed and self._is_leaf(block)

    def _is_valid(self, last_used: float, block: Block) -> bool:
        return block.last_used == last_used and self._evictable(block)
