"""Whether a block table that is cut at some token still has the blocks and rows that it then needs. Reads only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktransformer2.cache.block import BLOCK, RELEASED, ROWS, BlockTable
from ktransformer2.cache.block_store import BlockStore


def sees_all(table: BlockTable, stores: Sequence[BlockStore], keep: int) -> bool:
    """Whether every block that a query behind `keep` tokens sees is still there."""
    for group_table, store in zip(table.groups, stores, strict=True):
        entries, ends = group_table.entries, np.cumsum(group_table.entries[:, ROWS])
        window = store.group.window
        first = 0 if window is None else int(np.searchsorted(ends, keep - window + 1, side="right"))
        cut = int(np.searchsorted(ends, keep, side="left"))
        if keep and (entries[first : cut + 1, BLOCK] == RELEASED).any():
            return False
    return True


def refills(table: BlockTable, stores: Sequence[BlockStore], keep: int, block_tokens: int) -> bool:
    """Whether the block that is cut at `keep` tokens has its rows as computed, so that it fills again."""
    for group_table, store in zip(table.groups, stores, strict=True):
        entries, ends = group_table.entries, np.cumsum(group_table.entries[:, ROWS])
        cut = int(np.searchsorted(ends, keep, side="left"))
        if keep and ends[cut] != keep:
            block = store.block(int(entries[cut, BLOCK]))
            if not block.open_extent and int(entries[cut, ROWS]) == block_tokens:
                return False
    return True
