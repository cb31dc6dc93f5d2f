"""Growing, cutting and copying one block table. Knows no prefix hash; every block it needs comes from `Residency`.

Each edit either succeeds for every layer group or leaves the table as it was.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ktransformer2.cache.block import BLOCK, RELEASED, ROWS, Block, BlockTable, GroupTable
from ktransformer2.cache.block_store import BlockStore
from ktransformer2.cache.residency import Residency


class TableEdits:
    """Edits on block tables over the blocks of one `Residency`."""

    def __init__(self, residency: Residency, block_tokens: int) -> None:
        self._residency = residency
        self._block_tokens = block_tokens

    # --- growing

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Entries for `num_tokens` more rows in every group. False: no room, nothing has changed."""
        if self._fill(table, num_tokens):  # nearly every decode
            return True
        if not self._residency.could_hold(self._bytes_to_extend(table, num_tokens)):
            return False  # known before the first eviction, so that a request in vain costs nobody's prefix
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            if not self._extend_group(table, group_table, store, num_tokens):
                self.trim(table, table.num_tokens)
                return False
        return True

    def _fill(self, table: BlockTable, num_tokens: int) -> bool:
        """Entries for rows that the filling blocks take as they are, without being full then: nobody is asked for room.

        False: not all groups can, and nothing has changed.
        """
        filling = []
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            if not group_table.open_entry:
                return False
            block, rows = self._last_entry(group_table, store)
            is_closed = block.extent and not store.seals_in_place
            if is_closed or block.references > 1 or rows + num_tokens >= self._block_tokens:
                return False
            filling.append((group_table, block, rows + num_tokens))
        for group_table, block, rows in filling:
            block.rows = rows
            group_table.entries[-1, ROWS] = rows
        return True

    def _bytes_to_extend(self, table: BlockTable, num_tokens: int) -> int:
        """What `extend` will take, in bytes of extents."""
        size, total = self._block_tokens, 0
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            left, num_open, num_sealed = num_tokens, 0, 0
            if group_table.open_entry and num_tokens:
                block, rows = self._last_entry(group_table, store)
                num_open += block.references > 1
                num_sealed += rows + num_tokens >= size
                left = max(0, num_tokens - (size - rows))
            full, rest = divmod(left, size)
            num_sealed += full
            num_open += rest > 0
            if store.seals_in_place:
                num_open += full
                num_sealed = 0
            else:
                num_open += min(full, -(-max(0, table.rollback_tokens - rest) // size))
            total += num_open * store.open_layout.extent_bytes + num_sealed * store.sealed_layout.extent_bytes
        return total

    def _extend_group(self, table: BlockTable, group_table: GroupTable, store: BlockStore, num_tokens: int) -> bool:
        at, end, size = table.num_tokens, table.num_tokens + num_tokens, self._block_tokens
        if group_table.open_entry and num_tokens:
            at = self._fill_open(group_table, store, at, end)
            if at < 0:
                return False
        # One growth for a whole prompt, and one stretch. Without room for all, blocks are taken one by one by eviction.
        store.sealed_pool.reserve(max(0, end - at) // size)
        while at < end:
            rows = min(size, end - at)
            keep_open = rows < size or at + rows > end - table.rollback_tokens
            block = self._append_block(group_table, store, rows, keep_open)
            if block is None:
                return False
            if rows == size and not store.seals_in_place:
                if block.extent == 0 and not self._take_sealed(group_table, store):
                    return False
                group_table.sealing.append((block.block_id, at))
            at += rows
        return True

    def _append_block(self, group_table: GroupTable, store: BlockStore, rows: int, keep_open: bool) -> Block | None:
        near = self._last_block(group_table, store)
        block = self._residency.take(lambda: store.new_block(keep_open=keep_open, near=near))
        if block is not None:
            block.references, block.rows = 1, rows
            group_table.append(block.block_id, rows)
            group_table.open_entry = rows < self._block_tokens
        return block

    def append_copy(self, group_table: GroupTable, store: BlockStore, source: Block, rows: int) -> bool:
        """A filling block of the table's own that begins with `rows` rows of `source`. False: no room."""
        self._residency.refer(source)  # so that the copy's room is not made by evicting its source
        block = self._append_block(group_table, store, rows, keep_open=True)
        if block is not None:
            store.copy_open(source, block)
            self._residency.counters.copied_tokens += rows
        self._residency.unrefer(source)
        return block is not None

    def _fill_open(self, group_table: GroupTable, store: BlockStore, at: int, end: int) -> int:
        """Take rows into the filling block, copied first if shared; the logical index reached, or -1 for no room."""
        block, rows = self._last_entry(group_table, store)
        if block.references > 1:
            own = self._own_copy(group_table, store, rows)
            if own is None:
                return -1
            block = own
        if block.extent and not store.seals_in_place:
            store.reopen(block)  # somebody else closed it, and has left
        start = at - rows
        taken = min(self._block_tokens, end - start)
        if taken == self._block_tokens and not store.seals_in_place:
            if not self._take_sealed(group_table, store):
                return -1
            group_table.sealing.append((block.block_id, start))
        block.rows = taken
        group_table.entries[-1, ROWS] = taken
        group_table.open_entry = taken < self._block_tokens
        return start + taken

    def _own_copy(self, group_table: GroupTable, store: BlockStore, rows: int) -> Block | None:
        """Copy on write: the last entry's block is replaced by a copy of its rows as computed. None: no room."""
        shared, _ = self._last_entry(group_table, store)
        own = self._residency.take(lambda: store.new_block(keep_open=True, near=shared))
        if own is not None:
            self._replace_last(group_table, store, own, rows)
        return own

    def _replace_last(self, group_table: GroupTable, store: BlockStore, own: Block, rows: int) -> None:
        """The new block `own` takes the last entry's first `rows` rows as computed, and its place."""
        shared, _ = self._last_entry(group_table, store)
        store.copy_open(shared, own)
        own.references, own.rows = 1, rows
        self._residency.counters.copied_tokens += rows
        group_table.entries[-1, BLOCK] = own.block_id
        self._residency.unrefer(shared)

    def _take_sealed(self, group_table: GroupTable, store: BlockStore) -> bool:
        """The extent that the last entry's block will be sealed into, behind that of the block before it."""
        block, _ = self._last_entry(group_table, store)
        before = group_table.entries[:-1]
        near = store.block(int(before[-1, BLOCK])) if len(before) and before[-1, BLOCK] != RELEASED else None
        return self._residency.take(lambda: store.add_sealed(block, near) or None) is not None

    # --- cutting

    def trim(self, table: BlockTable, keep: int) -> bool:
        """Drop every row behind `keep` tokens; a block cut in its middle fills again.

        False: no room for the copy of one that is shared; nothing has changed.
        """
        copies: list[Block | None] = []
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            copy = None
            if self._cuts_shared(group_table, store, keep):
                copy = self._residency.take(partial(store.new_block, keep_open=True, near=None))
                if copy is None:
                    for made in filter(None, copies):
                        self._residency.stores[made.group].free(made)
                    return False
            copies.append(copy)
        for store, group_table, copy in zip(self._residency.stores, table.groups, copies, strict=True):
            self._trim_group(group_table, store, keep, copy)
        table.num_tokens = keep
        del table.tokens[keep:]
        del table.keys[keep // self._block_tokens :]
        return True

    def _cuts_shared(self, group_table: GroupTable, store: BlockStore, keep: int) -> bool:
        """Whether `keep` falls inside an entry whose block fills again, and that others name too."""
        ends = np.cumsum(group_table.entries[:, ROWS])
        cut = int(np.searchsorted(ends, keep, side="left"))
        if keep == 0 or cut == len(ends) or ends[cut] == keep:
            return False
        block_id, first_row, _, shift = group_table.entries[cut].tolist()
        block = store.block(block_id)
        return block.references > 1 and bool(block.open_extent) and not (first_row or shift)

    def _trim_group(self, group_table: GroupTable, store: BlockStore, keep: int, copy: Block | None) -> None:
        group_table.sealing.clear()
        start = group_table.num_rows
        while group_table.num_entries:
            rows = int(group_table.entries[-1, ROWS])
            start -= rows
            if start + rows <= keep:
                return
            if start < keep:
                self._shorten(group_table, store, keep - start, copy)
                return
            self._pop(group_table, store)

    def release(self, table: BlockTable) -> None:
        """Every entry, tail first, so that leaves are older than their roots."""
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            while group_table.num_entries:
                self._pop(group_table, store)

    def _pop(self, group_table: GroupTable, store: BlockStore) -> None:
        block_id = group_table.pop()
        group_table.open_entry = False
        if block_id != RELEASED:
            self._residency.unrefer(store.block(block_id))

    def _shorten(self, group_table: GroupTable, store: BlockStore, rows: int, copy: Block | None) -> None:
        """Cut the last entry to `rows`. At its own positions, with its rows as computed, the block fills again."""
        _, first_row, _, shift = group_table.entries[-1].tolist()
        block, _ = self._last_entry(group_table, store)
        group_table.entries[-1, ROWS] = rows
        if first_row or shift or not block.open_extent:
            return
        if copy is not None:
            self._replace_last(group_table, store, copy, rows)
        else:
            if block.indexed:
                self._residency.indexes[block.group].remove(block)
            store.reopen(block)
            block.rows = rows
        group_table.open_entry = True

    def bares_released(self, table: BlockTable, start: int, stop: int) -> bool:
        """Whether rows that a window let go would come into view again once [start, stop) has left."""
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            window = store.group.window
            if window is None:
                continue
            ends = np.cumsum(group_table.entries[:, ROWS])
            # The newest row that stays of each entry, in the new numbering; below `start`: one before the cut.
            newest = np.where(ends - 1 >= stop, ends - 1 - (stop - start), np.minimum(ends, start) - 1)
            visible = newest >= table.num_tokens - (stop - start) - window + 1
            if (visible & (newest >= 0) & (group_table.entries[:, BLOCK] == RELEASED)).any():
                return True
        return False

    def cut(self, table: BlockTable, start: int, stop: int) -> None:
        """Rows [start, stop) leave; what follows closes up by a shift. An entry cut in its middle becomes two."""
        self.close_last(table)
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            kept: list[tuple[int, int, int, int]] = []
            gone: list[int] = []
            at = 0
            for block_id, first_row, rows, shift in group_table.entries.tolist():
                before, after = max(0, min(rows, start - at)), max(0, min(rows, at + rows - stop))
                pieces = [(block_id, first_row, before, shift)] if before else []
                if after:
                    pieces.append((block_id, first_row + rows - after, after, shift - (stop - start)))
                kept += pieces
                at += rows
                if block_id != RELEASED and len(pieces) == 2:
                    self._residency.refer(store.block(block_id))
                elif block_id != RELEASED and not pieces:
                    gone.append(block_id)
            group_table.replace(np.array(kept, np.int32))
            for block_id in reversed(gone):
                self._residency.unrefer(store.block(block_id))

    def close_last(self, table: BlockTable) -> None:
        """The filling block takes no more rows: what comes next stands at other positions."""
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            if group_table.open_entry:
                store.close(self._last_entry(group_table, store)[0])
                group_table.open_entry = False

    # --- letting go while running

    def drop_open_rows(self, table: BlockTable, num_new: int) -> None:
        """Sealed blocks out of a rollback's reach give back their rows as computed; `num_new` came in this step."""
        reach = table.num_tokens - table.rollback_tokens
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            if store.seals_in_place:
                continue
            end = table.num_tokens
            for entry in group_table.entries[::-1]:
                block_id, _, rows, _ = entry.tolist()
                # What ends a block before the reach of the step before was dropped then.
                if block_id == RELEASED or end <= reach - num_new - self._block_tokens:
                    break
                block = store.block(block_id)
                if end <= reach and block.references == 1:  # a fork may still reach it; the last one to leave drops it
                    store.drop_open(block)
                end -= rows

    def release_passed(self, table: BlockTable) -> None:
        """Blocks that the window has passed for every later query leave the table, also while the sequence runs."""
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            if store.group.window is None:
                continue
            first_visible = table.num_tokens - table.rollback_tokens - store.group.window + 1
            ends = np.cumsum(group_table.entries[:, ROWS])
            passed = int(np.searchsorted(ends, first_visible, side="right"))
            held = group_table.entries[: min(passed, group_table.num_entries - 1), BLOCK]
            for i in np.flatnonzero(held != RELEASED).tolist():
                block = store.block(int(held[i]))
                held[i] = RELEASED
                self._residency.unrefer(block)

    @staticmethod
    def _last_entry(group_table: GroupTable, store: BlockStore) -> tuple[Block, int]:
        """The last entry's block and rows."""
        block_id, _, rows, _ = group_table.entries[-1].tolist()
        return store.block(block_id), rows

    @staticmethod
    def _last_block(group_table: GroupTable, store: BlockStore) -> Block | None:
        if group_table.num_entries == 0 or group_table.entries[-1, BLOCK] == RELEASED:
            return None
        return store.block(int(group_table.entries[-1, BLOCK]))
