"""The blocks of one layer group and where their pages are: ids, extents, page tables. Knows no prefix and no sequence.

Two tables of shape [num_blocks, layers]: `page_table` says where the rows are that other blocks' queries read,
`open_table` where the rows are as computed. Only this file writes them, and only for `KVCache`.

Invariants: an extent belongs to one block; a freed block's table rows are 0; the tables are charged to the limit.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Sequence

import torch

from ktransformer2.cache.block import Block
from ktransformer2.cache.sizing import page_table_bytes, page_table_rows
from ktransformer2.config import CacheConfig
from ktransformer2.layout import ExtentLayout, Form, ModelGeometry
from ktransformer2.memory.arena import Arena
from ktransformer2.memory.defrag import Move, plan_moves
from ktransformer2.memory.growth import GrowthPolicy
from ktransformer2.memory.slab import SlabPool


class BlockStore:
    """Makes, moves and frees blocks. No room is a return value."""

    def __init__(self, arena: Arena, geometry: ModelGeometry, index: int, sealed: Form, config: CacheConfig) -> None:
        """The store of `geometry.groups[index]`, whose full blocks are held in the form `sealed`."""
        group, full = geometry.groups[index], geometry.full_form
        self.group, self.index, self._arena = group, index, arena
        self.open_layout = ExtentLayout.uniform(group, config.block_tokens, full)
        self.sealed_layout = ExtentLayout.uniform(group, config.block_tokens, sealed)
        self.seals_in_place = full == sealed
        self.open_pool = self._pool(self.open_layout, config)
        self.sealed_pool = self.open_pool if self.seals_in_place else self._pool(self.sealed_layout, config)
        self.blocks: list[Block | None] = []
        self._free_ids: list[int] = []
        self._owners: dict[int, Block] = {}
        layers = len(group.layers)
        self.page_table = torch.zeros(0, layers, dtype=torch.int64)
        self.open_table = torch.zeros(0, layers, dtype=torch.int64)

    def _pool(self, layout: ExtentLayout, config: CacheConfig) -> SlabPool:
        return SlabPool(self._arena, layout.extent_bytes, config.block_tokens, GrowthPolicy(config))

    @property
    def pools(self) -> tuple[SlabPool, ...]:
        return (self.open_pool,) if self.seals_in_place else (self.open_pool, self.sealed_pool)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) - len(self._free_ids)

    def block(self, block_id: int) -> Block:
        block = self.blocks[block_id] if block_id >= 0 else None
        assert block is not None, f"block {self.index}:{block_id} is free"
        return block

    def live_blocks(self) -> list[Block]:
        return [block for block in self.blocks if block is not None]

    # --- blocks

    def new_block(self, *, keep_open: bool, near: Block | None) -> Block | None:
        """A filling block (`keep_open`) or one that is sealed straight from the step's rows. None: no room."""
        if not self._free_ids and not self._grow_tables():
            return None
        pool = self.open_pool if keep_open or self.seals_in_place else self.sealed_pool
        address = pool.allocate(self._near(pool, near))
        if address is None:
            return None
        block = Block(heapq.heappop(self._free_ids), self.index)
        self.blocks[block.block_id] = block
        self._owners[address] = block
        if pool is self.open_pool:
            self._set_open(block, address)
        if pool is self.sealed_pool:
            self._set_extent(block, address)
        return block

    def add_sealed(self, block: Block, near: Block | None) -> bool:
        """Give a filling block the extent that it will be sealed into. False: no room."""
        assert block.extent == 0, f"{block} has a sealed extent"
        address = self.sealed_pool.allocate(self._near(self.sealed_pool, near))
        if address is None:
            return False
        self._owners[address] = block
        self._set_extent(block, address)
        return True

    def reopen(self, block: Block) -> None:
        """The block is filling again, from its rows as computed. It always is where nothing is quantised."""
        assert block.open_extent, f"{block} has no rows as computed"
        if block.extent not in (0, block.open_extent):
            self._give_back(self.sealed_pool, block.extent)
        self._set_extent(block, block.open_extent if self.seals_in_place else 0)

    def drop_open(self, block: Block) -> None:
        """Rows as computed are no longer needed: the block is sealed and no rollback reaches it."""
        if block.open_extent and block.extent and block.open_extent != block.extent:
            self._give_back(self.open_pool, block.open_extent)
            self._set_open(block, 0)

    def close(self, block: Block) -> None:
        """A filling block takes no more rows; it is read in full form from now on."""
        if block.extent == 0:
            self._set_extent(block, block.open_extent)

    def free(self, block: Block) -> None:
        assert block.references == 0, f"{block} is in use"
        assert not block.indexed, f"{block} can still be found"
        if block.extent and block.extent != block.open_extent:
            self._give_back(self.sealed_pool, block.extent)
        if block.open_extent:
            self._give_back(self.open_pool, block.open_extent)
        self._set_open(block, 0)
        self._set_extent(block, 0)
        self.blocks[block.block_id] = None
        heapq.heappush(self._free_ids, block.block_id)

    def copy_open(self, source: Block, target: Block) -> None:
        """The rows as computed of `source` become those of `target`."""
        assert source.open_extent, f"{source} has no rows as computed"
        assert target.open_extent, f"{target} takes no rows as computed"
        ctypes.memmove(target.open_extent, source.open_extent, self.open_layout.extent_bytes)

    def read_sealed(self, block: Block) -> bytearray:
        """A copy of a full block's extent as another process, or another machine, can take it: `sealed_layout`'s bytes.

        What is no row of the block, at the end of the extent, is 0: an address may have held another prompt's rows.
        """
        assert self._is_sealed(block), f"{block} is not sealed"
        payload = bytearray(self.sealed_layout.extent_bytes)
        target = (ctypes.c_char * len(payload)).from_buffer(payload)
        ctypes.memmove(target, block.extent, self._row_bytes)
        return payload

    def write_sealed(self, block: Block, payload: bytearray | memoryview) -> None:
        """Make of a new block the full one that `read_sealed` has copied."""
        assert self._is_sealed(block), f"{block} has no sealed extent"
        assert len(payload) == self.sealed_layout.extent_bytes, f"{len(payload)} bytes for {block}"
        source = (ctypes.c_char * len(payload)).from_buffer(payload)
        ctypes.memmove(block.extent, source, len(payload))
        block.rows = self.sealed_layout.block_tokens

    @property
    def _row_bytes(self) -> int:
        """Up to where an extent in sealed form holds pages."""
        return self.sealed_layout.page_offsets[-1] + self.sealed_layout.pages[-1].page_bytes

    def _is_sealed(self, block: Block) -> bool:
        return block.extent != 0 and (self.seals_in_place or block.extent != block.open_extent)

    def block_bytes(self, block: Block) -> int:
        sealed = self.sealed_layout.extent_bytes if block.extent not in (0, block.open_extent) else 0
        return sealed + (self.open_layout.extent_bytes if block.open_extent else 0)

    # --- moving

    def defragment(self, budget_bytes: int, chains: Sequence[Sequence[Block]] = ()) -> int:
        """Move extents so that runs empty and order returns; bytes moved. Handles do not change, only table rows.

        `chains`: blocks in the order in which a sequence reads them; among the moved ones neighbours come side by side.
        """
        moved = 0
        for pool in self.pools:
            # A budget below one extent would never move anything.
            budget = max(budget_bytes - moved, pool.extent_bytes if not moved else 0)
            order = [[self._in_pool(pool, block) for block in chain] for chain in chains]
            moves = plan_moves(pool, budget, [[address for address in chain if address] for chain in order])
            moved += sum(self._move(pool, move) for move in moves)
        return moved

    def _move(self, pool: SlabPool, move: Move) -> int:
        block = self._owners[move.source]
        ctypes.memmove(move.destination, move.source, move.num_bytes)
        was_open, was_extent = block.open_extent == move.source, block.extent == move.source
        self._owners[move.destination] = block
        if was_open:
            self._set_open(block, move.destination)
        if was_extent:
            self._set_extent(block, move.destination)
        self._give_back(pool, move.source)
        return move.num_bytes

    # --- tables

    def _grow_tables(self) -> bool:
        return self._resize_tables(page_table_rows(2 * len(self.blocks)))

    def shrink_tables(self) -> None:
        """Give back the table rows behind the highest block id in use; no room for the copy: they stay."""
        highest = max((block.block_id for block in self.live_blocks()), default=-1)
        rows = page_table_rows(highest + 1) if highest >= 0 else 0
        if rows < len(self.blocks):
            self._resize_tables(rows)

    def _resize_tables(self, rows: int) -> bool:
        """Copy both tables into `rows` rows. Old and new are charged while both are there. False: no room."""
        before, kept = self.table_bytes(), min(rows, len(self.blocks))
        if not self._arena.charge(page_table_bytes(self.group, rows)):
            return False
        for name in ("page_table", "open_table"):
            with torch.inference_mode(False):  # tables outlive the caller's mode, and may be written outside of it
                table = torch.zeros(rows, len(self.group.layers), dtype=torch.int64)
            table[:kept] = getattr(self, name)[:kept]
            setattr(self, name, table)
        self._arena.discharge(before)
        self.blocks = self.blocks[:kept] + [None] * (rows - kept)
        self._free_ids = [block_id for block_id, block in enumerate(self.blocks) if block is None]
        return True

    def _set_extent(self, block: Block, address: int) -> None:
        """Rows of the page table: sealed forms, or full ones where the sealed rows are the open rows."""
        layout = self.open_layout if address and address == block.open_extent else self.sealed_layout
        block.extent = address
        self.page_table[block.block_id] = torch.tensor(layout.entries(address)) if address else 0

    def _set_open(self, block: Block, address: int) -> None:
        block.open_extent = address
        self.open_table[block.block_id] = torch.tensor(self.open_layout.entries(address)) if address else 0

    def _near(self, pool: SlabPool, block: Block | None) -> int:
        """The address in `pool` that the sequence's last block has, so that the next one lies behind it."""
        return 0 if block is None else self._in_pool(pool, block)

    def _in_pool(self, pool: SlabPool, block: Block) -> int:
        """The block's extent in `pool`; 0: it has none there."""
        if pool is self.open_pool:
            return block.open_extent
        return block.extent if block.extent != block.open_extent else 0

    def _give_back(self, pool: SlabPool, address: int) -> None:
        del self._owners[address]
        pool.free(address)

    # --- figures and checks

    def table_bytes(self) -> int:
        """Bytes of both page tables as they are."""
        return page_table_bytes(self.group, len(self.page_table))

    def check_integrity(self) -> None:
        owners: dict[int, Block] = {}
        for block in self.live_blocks():
            for address in {block.extent, block.open_extent} - {0}:
                assert address not in owners, f"extent {address:#x} belongs to {owners[address]} and {block}"
                owners[address] = block
            layout = self.open_layout if block.extent == block.open_extent else self.sealed_layout
            for table, form, address in (
                (self.page_table, layout, block.extent),
                (self.open_table, self.open_layout, block.open_extent),
            ):
                expected = form.entries(address) if address else [0] * len(self.group.layers)
                assert table[block.block_id].tolist() == expected, f"table row of {block}"
        assert owners == self._owners, f"{len(owners)} extents in blocks, {len(self._owners)} in the register"
        assert sum(pool.num_used for pool in self.pools) == len(owners), "extents in pools and in blocks differ"
        for block_id in self._free_ids:
            assert self.blocks[block_id] is None, f"free id {block_id} names a block"
            assert not self.page_table[block_id].any(), f"free id {block_id} has pages"
        for pool in self.pools:
            pool.check_integrity()
