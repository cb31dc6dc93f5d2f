"""From block tables to the kernels' view of one step: pure reading, no block changes here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch

from ktransformer2.cache.block import BLOCK, ROWS, BlockTable
from ktransformer2.cache.block_store import BlockStore
from ktransformer2.kernels.batch import KVBatch


def build_batch(store: BlockStore, step: Sequence[tuple[BlockTable, int]], block_tokens: int) -> KVBatch:
    """One layer group's `KVBatch` of a step; `step` names each table and how many of its rows are new."""
    group = store.index
    group_tables = [table.groups[group] for table, _ in step]
    query_starts = [0, *accumulate(num_new for _, num_new in step)]
    entry_starts = [0, *accumulate(group_table.num_entries for group_table in group_tables)]
    entries = np.concatenate([group_table.entries for group_table in group_tables])  # [E, 4]
    if all(num_new == 1 for _, num_new in step):  # a token each: the newest row of each last entry
        last = entries[np.array(entry_starts[1:]) - 1].astype(np.int64)
        slots = last[:, BLOCK] * block_tokens + last[:, ROWS] - 1
    else:
        pieces = [_slots(table, group, num_new, block_tokens) for table, num_new in step]
        slots = np.concatenate(list(chain.from_iterable(pieces)))
    seals = [
        (block_id, row + start - table.num_tokens if not store.block(block_id).open_extent else -1)
        for (table, _), group_table, row in zip(step, group_tables, query_starts, strict=False)
        for block_id, start in group_table.sealing
    ]
    return KVBatch(
        group=store.group,
        block_tokens=block_tokens,
        page_table=store.page_table,
        open_table=store.open_table,
        slot_mapping=torch.from_numpy(slots),  # [T]
        query_starts=torch.tensor(query_starts, dtype=torch.int32),  # [S+1]
        context_lens=torch.tensor([table.num_tokens for table, _ in step], dtype=torch.int32),  # [S]
        entry_starts=torch.tensor(entry_starts, dtype=torch.int32),  # [S+1]
        entries=torch.from_numpy(entries),
        seals=torch.tensor(seals, dtype=torch.int32).reshape(-1, 2),  # [N, 2]
    )


def _slots(table: BlockTable, group: int, num_new: int, block_tokens: int) -> list[np.ndarray]:
    """Slots of the table's new rows, entry by entry from the last one back to the first that holds a new row."""
    entries = table.groups[group].entries
    end, pieces = table.num_tokens + num_new, []
    # All but the first and the last entry with a new row are full: no need to look at a whole context.
    tail = entries[-(num_new // block_tokens + 2) :, [BLOCK, ROWS]]
    for block_id, rows in tail[::-1].tolist():
        if end <= table.num_tokens:
            break
        start = max(end - rows, table.num_tokens)
        base = block_id * block_tokens - (end - rows)
        pieces.append(np.arange(base + start, base + end, dtype=np.int64))
        end -= rows
    return pieces[::-1]
