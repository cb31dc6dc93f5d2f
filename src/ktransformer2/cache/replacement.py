"""Which cached block leaves first: least recently used, leaves before roots. Knows keys and times, no bytes.

A lazy heap: an entry is valid while its block is still unused, still a leaf, and was not used since. O(log n) a call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from ktransformer2.cache.block import Block


class LeavesFirstLRU:
    """Candidates for eviction in the order of their last use. `is_leaf` is asked at the moment of choice."""

    def __init__(self, is_leaf: Callable[[Block], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[float, int, Block]] = []
        self._ticket = count()

    def offer(self, block: Block) -> None:
        """The block may have become evictable: it lost its last user, or its last child."""
        if block.references == 0 and block.indexed and self._is_leaf(block):
            heapq.heappush(self._heap, (block.last_used, next(self._ticket), block))

    def oldest(self) -> Block | None:
        """The next victim, left in place; None when nothing can go."""
        while self._heap:
            last_used, _, block = self._heap[0]
            if block.indexed and not block.references and block.last_used == last_used and self._is_leaf(block):
                return block
            heapq.heappop(self._heap)
        return None
