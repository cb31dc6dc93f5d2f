"""The blocks of a cache one by one: ids, states, sizes and ages, a page at a time. No key, no token, no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from ktransformer2.cache.block import Block
from ktransformer2.cache.block_store import BlockStore

State = Literal["filling", "sealed", "cached"]


@dataclass(frozen=True)
class ListedBlock:
    """One block. `references`: table entries and pins that name it.

    `idle_s`: since its last user left, None while it has one.
    `age_s`: since it could first be found; None: it cannot be.
    """

    group: int
    block_id: int
    state: State
    rows: int
    num_bytes: int
    references: int
    age_s: float | None
    idle_s: float | None


@dataclass(frozen=True)
class BlockPage:
    """Blocks in the order of their groups and ids. `next_start` lists those that follow; None: there are no more."""

    blocks: tuple[ListedBlock, ...]
    next_start: int | None


def list_blocks(stores: Sequence[BlockStore], now: float, start: int, limit: int) -> BlockPage:
    """At most `limit` blocks from place `start` on. Cost: O(limit), and a skip over the places before."""
    found: list[ListedBlock] = []
    places = chain.from_iterable(store.blocks for store in stores)
    for place, block in enumerate(islice(places, start, None), start):
        if block is None:
            continue
        if len(found) == limit:
            return BlockPage(tuple(found), place)
        found.append(_listed(block, stores[block.group], now))
    return BlockPage(tuple(found), None)


def _listed(block: Block, store: BlockStore, now: float) -> ListedBlock:
    in_use = block.references > 0
    state: State = "cached" if not in_use else "sealed" if block.rows == store.open_layout.block_tokens else "filling"
    return ListedBlock(
        block.group,
        block.block_id,
        state,
        block.rows,
        store.block_bytes(block),
        block.references,
        now - block.published_s if block.indexed else None,
        None if in_use else now - block.last_used,
    )
