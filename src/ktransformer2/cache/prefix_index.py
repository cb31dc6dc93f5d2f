"""Which blocks hold which prefix, for one layer group: a dict from prefix hash to block, and each block's children.

Knows no memory, no order of eviction and no table. A full block is found by its key; a partly filled one only as a
child of the block before it. The first block to claim a key keeps it.

Invariants: every indexed block is a child of its `parent`; `get(key).key == key`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ktransformer2.cache.block import Block, next_key


class PrefixIndex:
    """Prefix hash -> block, with the tree kept: what continues a prefix, full or in part.

    `added` hears of every block once it can be found, `removed` of every block that no longer can.
    """

    def __init__(
        self, added: Callable[[Block], None] = lambda _: None, removed: Callable[[Block], None] = lambda _: None
    ) -> None:
        self._added, self._removed = added, removed
        self._blocks: dict[bytes, Block] = {}
        self._children: dict[bytes, dict[int, Block]] = {}

    def __len__(self) -> int:
        return sum(len(children) for children in self._children.values())

    def __iter__(self) -> Iterator[Block]:
        for children in self._children.values():
            yield from children.values()

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def add(self, block: Block, parent: bytes, tokens: bytes, *, full: bool) -> bool:
        """Index `block` as what follows `parent` with `tokens`. False: another block already holds exactly that."""
        assert not block.indexed, f"{block} is indexed already"
        key = next_key(parent, tokens) if full else None
        if key is not None and key in self._blocks:
            return False
        siblings = self._children.setdefault(parent, {})
        if key is None and any(sibling.tokens.startswith(tokens) for sibling in siblings.values()):
            return False
        block.key, block.parent, block.tokens, block.indexed = key, parent, tokens, True
        siblings[block.block_id] = block
        if key is not None:
            self._blocks[key] = block
        self._added(block)
        return True

    def remove(self, block: Block) -> None:
        siblings = self._children[block.parent]
        del siblings[block.block_id]
        if not siblings:
            del self._children[block.parent]
        if block.key is not None:
            del self._blocks[block.key]
        block.key, block.indexed = None, False
        self._removed(block)

    def has_child(self, parent: bytes) -> bool:
        """Whether any block is indexed behind `parent`."""
        return parent in self._children

    def children(self, parent: bytes) -> Collection[Block]:
        """The blocks indexed behind `parent`."""
        return self._children.get(parent, {}).values()

    def longest_child(self, parent: bytes, tokens: bytes) -> tuple[Block | None, int]:
        """The child of `parent` that shares the most leading tokens with `tokens`, and how many those are."""
        best: tuple[Block | None, int] = (None, 0)
        better = tokens[:4]  # what a child must begin with to be better: told at once, however many children there are
        for block in self.children(parent):
            if better and block.tokens.startswith(better):
                shared = common_tokens(block.tokens, tokens)
                best, better = (block, shared), tokens[4 * shared :] and tokens[: 4 * (shared + 1)]
        return best

    def check_integrity(self) -> None:
        seen = {block.key: block for block in self if block.key is not None}
        assert seen == self._blocks, f"{len(seen)} keyed children, {len(self._blocks)} keys"
        for parent, children in self._children.items():
            assert children, f"empty children of {parent.hex()[:8]}"
            for block in children.values():
                assert (block.indexed, block.parent) == (True, parent), f"{block} is not a child of its parent"
                assert block.key is None or block.key == next_key(parent, block.tokens), f"{block} has a foreign key"


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading 4-byte tokens two byte strings share."""
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:  # bisect: slices compare at memcmp speed
        middle = (low + high + 1) // 2
        if a[: 4 * middle] == b[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
