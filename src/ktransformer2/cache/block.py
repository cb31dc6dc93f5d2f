"""Blocks and block tables: the handles. Knows no memory, no index and no request.

A block is `block_tokens` consecutive tokens over the layers of one group. Its id never changes while it lives.

    free -> filling -> sealed -> cached -> evicted
              |          |         +-- nobody uses it; findable until something better needs the room
              |          +-- full: in its sealed form, immutable, shareable
              +-- being appended to, rows as computed

Invariants: `references` is the number of block-table entries and pins that name the block; logical indices of a table
are the running sum of its entries' `rows`; only the last entry of a table may be open, and then `first_row` is 0.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK, FIRST_ROW, ROWS, SHIFT = range(4)
RELEASED = -1
_TOKEN_BYTES = 4
_KEY_BYTES = 32 + 33 + 8  # a SHA-256 digest, its object, its place in the list
_ENTRY_BYTES = 16  # four int32; the array doubles, so up to twice that is held


class Block:
    """One block of one layer group.

    `extent` holds the rows that later blocks' queries read (0: none yet), `open_extent` the rows as computed (0: gone).
    Both are the same address when the sealed form is the full form, or when the block was closed before it was full.
    `key` is the prefix hash of a full, indexed block; `parent` the hash before it; `tokens` its tokens, 4 bytes each.
    `begins`: nothing comes before it. `came_from`: the tier that restored it, until a prompt finds it; empty: none.
    `published_s` and `last_used`: when it could be found first, and when its last user left; by the cache's clock.
    """

    __slots__ = (
        "begins",
        "block_id",
        "came_from",
        "extent",
        "group",
        "indexed",
        "key",
        "last_used",
        "open_extent",
        "parent",
        "published_s",
        "references",
        "rows",
        "tokens",
    )

    def __init__(self, block_id: int, group: int) -> None:
        self.block_id = block_id
        self.group = group
        self.extent = 0
        self.open_extent = 0
        self.rows = 0
        self.references = 0
        self.indexed = False
        self.key: bytes | None = None
        self.parent = b""
        self.tokens = b""
        self.begins = False
        self.came_from = ""
        self.published_s = 0.0
        self.last_used = 0.0

    def __repr__(self) -> str:
        return f"Block({self.group}:{self.block_id}, rows={self.rows}, references={self.references})"


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Canonical bytes of token ids, 4 each: what is hashed and compared."""
    return array("i", token_ids).tobytes()


def root_key(fingerprint: bytes, salt: bytes, plan: str, block_tokens: int) -> bytes:
    """Start of a hash chain: all that decides what a key or value is, besides the tokens. Fields carry lengths."""
    fields = (fingerprint, salt, plan.encode(), str(block_tokens).encode())
    return hashlib.sha256(b"".join(len(f).to_bytes(8, "little") + f for f in fields)).digest()


def table_bytes(num_tokens: int, block_tokens: int, num_groups: int) -> int:
    """About what a block table itself takes, by whole blocks: their tokens, a key and an entry each."""
    block_bytes = _TOKEN_BYTES * block_tokens + _KEY_BYTES + 2 * _ENTRY_BYTES * num_groups
    return (num_tokens // block_tokens + 1) * block_bytes


def next_key(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a block covers its tokens and, through the parent, all tokens before it (SHA-256)."""
    return hashlib.sha256(parent + tokens).digest()


class GroupTable:
    """The entries `(block_id, first_row, rows, shift)` of one sequence over one layer group, int32, in order.

    `open_entry`: the last entry still takes rows. `sealing`: (block_id, logical start) of blocks the coming step fills.
    """

    __slots__ = ("_entries", "num_entries", "open_entry", "sealing")

    def __init__(self) -> None:
        self._entries = np.empty((8, 4), np.int32)
        self.num_entries = 0
        self.open_entry = False
        self.sealing: list[tuple[int, int]] = []

    @property
    def entries(self) -> npt.NDArray[np.int32]:
        """A view [num_entries, 4]; writing to it edits the table."""
        return self._entries[: self.num_entries]

    @property
    def num_rows(self) -> int:
        return int(self.entries[:, ROWS].sum())

    def append(self, block_id: int, rows: int, *, first_row: int = 0, shift: int = 0) -> None:
        if self.num_entries == len(self._entries):
            self._entries = np.concatenate([self._entries, np.empty_like(self._entries)])
        self._entries[self.num_entries] = (block_id, first_row, rows, shift)
        self.num_entries += 1

    def pop(self) -> int:
        """Remove the last entry; its block id."""
        self.num_entries -= 1
        return int(self._entries[self.num_entries, BLOCK])

    def replace(self, entries: npt.NDArray[np.int32]) -> None:
        self._entries = np.ascontiguousarray(entries, dtype=np.int32).reshape(-1, 4)
        self.num_entries = len(self._entries)
        if self.num_entries == 0:
            self._entries = np.empty((8, 4), np.int32)

    def copy(self) -> GroupTable:
        other = GroupTable()
        other._entries = self._entries.copy()
        other.num_entries, other.open_entry = self.num_entries, self.open_entry
        return other


class BlockTable:
    """What one sequence sees of the cache. Made, grown and let go only by `KVCache`; a caller reads the counts.

    `num_tokens`: tokens whose rows are computed. `pending`: rows allocated for the coming step.
    `cached_tokens`: tokens adopted from a prefix match; `restored_tokens`: those of them that a tier had kept, by its
    name. `next_position`: where the next token is rotated to.
    `rollback_tokens`: how many of its newest tokens can be taken back exactly; may be raised at any time.
    """

    __slots__ = (
        "cached_tokens",
        "charged_bytes",
        "groups",
        "keys",
        "num_tokens",
        "pending",
        "position_offset",
        "publishes",
        "restored_tokens",
        "rollback_tokens",
        "root",
        "tokens",
    )

    def __init__(self, num_groups: int, root: bytes, publishes: bool, rollback_tokens: int = 0) -> None:
        self.groups = [GroupTable() for _ in range(num_groups)]
        self.root = root
        self.publishes = publishes
        self.rollback_tokens = rollback_tokens
        self.tokens = array("i")
        self.keys: list[bytes] = []
        self.num_tokens = 0
        self.pending = 0
        self.cached_tokens = 0
        self.restored_tokens: dict[str, int] = {}
        self.charged_bytes = 0
        self.position_offset = 0

    def copy(self) -> BlockTable:
        """The same entries and counts; the caller counts the references."""
        other = BlockTable(0, self.root, self.publishes, self.rollback_tokens)
        other.groups = [group_table.copy() for group_table in self.groups]
        other.tokens, other.keys = self.tokens[:], list(self.keys)
        other.num_tokens, other.cached_tokens = self.num_tokens, self.cached_tokens
        other.restored_tokens = dict(self.restored_tokens)
        other.position_offset = self.position_offset
        return other

    def bytes_with(self, num_tokens: int, block_tokens: int) -> int:
        """About what the table itself takes with `num_tokens` more."""
        return table_bytes(self.num_tokens + num_tokens, block_tokens, len(self.groups))

    @property
    def next_position(self) -> int:
        return self.num_tokens + self.position_offset

    def tail_key(self) -> bytes:
        """The hash after the last hashed block."""
        return self.keys[-1] if self.keys else self.root
