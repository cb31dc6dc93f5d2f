"""What one step tells the kernels about one layer group. Plain tensors; knows no block's life and no request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktransformer2.layout import LayerGroup, RopeSpec

# The tensors of a `KVBatch`, in the order of the native struct.
BATCH_DTYPES = {
    "page_table": torch.int64,
    "open_table": torch.int64,
    "slot_mapping": torch.int64,
    "query_starts": torch.int32,
    "context_lens": torch.int32,
    "entry_starts": torch.int32,
    "entries": torch.int32,
    "seals": torch.int32,
}


@dataclass(frozen=True)
class KVBatch:
    """One flat batch over one layer group: where new rows go, and what every sequence sees.

    Shapes (B block ids, L layers of the group, T new tokens, S sequences, E entries, N seals):
        page_table   int64 [B, L]  address and forms of every page, see `layout.pack_page`; 0: not here
        open_table   int64 [B, L]  page with the rows *as computed* (full form), for blocks that have one; else 0
        slot_mapping int64 [T]     block_id * block_tokens + offset of every new token
        query_starts int32 [S+1]   the new tokens of sequence s are rows query_starts[s]:query_starts[s+1]
        context_lens int32 [S]     logical index of the sequence's first new token = tokens it sees before it
        entry_starts int32 [S+1]   the block table of sequence s is entries[entry_starts[s]:entry_starts[s+1]]
        entries      int32 [E, 4]  (block_id, first_row, rows, shift); block_id -1: released, no query may see it
        seals        int32 [N, 2]  (block_id, row): the block becomes full in this step and takes its sealed form;
                                   its rows are k[row:row+P], or, where row is -1, lie in its open page

    The logical index of a token is the sum of `rows` before it in the block table. A query with logical index i reads
    the entry that holds i *as computed* up to and including i, and all earlier entries through `page_table`.
    As computed means: the open page if the block has one, else the page-table page where its forms are full,
    else the new tensors k and v (the entry then begins at or after the sequence's first new token).
    """

    group: LayerGroup
    block_tokens: int
    page_table: torch.Tensor
    open_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    entry_starts: torch.Tensor
    entries: torch.Tensor
    seals: torch.Tensor


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention is. `window`: newest tokens a query sees, itself included. `softcap`: c * tanh(x / c).

    `sinks` [H]: one extra logit per head that takes part in the softmax and has no value (GPT-OSS).
    `rope` is needed only where an entry has a shift: queries are turned back by it, keys are never touched.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    rope: RopeSpec | None = None
