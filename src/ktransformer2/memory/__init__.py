"""Bytes: a buddy arena over reserved addresses, slabs of equal extents, a pure growth policy, and a planner of moves.

Start at `SlabPool.allocate`; below it stands `Arena.commit`. Knows no block, no tensor and no request.
"""

from ktransformer2.memory.arena import Arena, ArenaStats
from ktransformer2.memory.defrag import Move, plan_moves
from ktransformer2.memory.growth import GrowthPolicy, PoolUse
from ktransformer2.memory.slab import SlabPool, SlabStats

__all__ = ["Arena", "ArenaStats", "GrowthPolicy", "Move", "PoolUse", "SlabPool", "SlabStats", "plan_moves"]
