"""PrefixIndex and GroupTable against naive twins: a list of token strings, and a list of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ktransformer2.cache.block import Block, GroupTable, next_key, token_bytes
from ktransformer2.cache.prefix_index import PrefixIndex, common_tokens

ROOT = b"root"
SIZE = 4
TOKENS = st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE)


class IndexMachine(RuleBasedStateMachine):
    """Blocks of four tokens under a tree of prefixes; the twin is every indexed block's full path of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.paths: dict[tuple[int, ...], Block] = {}  # whole blocks
        self.partial: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # block id -> (path before, rows)
        self.made: dict[int, Block] = {}

    def key_of(self, path: tuple[int, ...]) -> bytes:
        key = ROOT
        for at in range(0, len(path), SIZE):
            key = next_key(key, token_bytes(path[at : at + SIZE]))
        return key

    def new_block(self) -> Block:
        block = Block(len(self.made), 0)
        self.made[block.block_id] = block
        return block

    @rule(data=st.data(), tokens=TOKENS)
    def add_full(self, data: st.DataObject, tokens: list[int]) -> None:
        before = data.draw(st.sampled_from([(), *sorted(self.paths)]))
        block, path = self.new_block(), (*before, *tokens)
        assert self.index.add(block, self.key_of(before), token_bytes(tokens), full=True) == (path not in self.paths)
        self.paths.setdefault(path, block)

    @rule(data=st.data(), tokens=TOKENS, rows=st.integers(1, SIZE - 1))
    def add_partial(self, data: st.DataObject, tokens: list[int], rows: int) -> None:
        before = data.draw(st.sampled_from([(), *sorted(self.paths)]))
        own = tuple(tokens[:rows])
        siblings = [path[len(before) :] for path in self.paths if path[:-SIZE] == before]
        siblings += [other for start, other in self.partial.values() if start == before]
        block, known = self.new_block(), any(other[:rows] == own for other in siblings)
        assert self.index.add(block, self.key_of(before), token_bytes(own), full=False) == (not known)
        if not known:
            self.partial[block.block_id] = (before, own)

    @precondition(lambda self: self.paths or self.partial)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        victims = [*self.paths.values(), *(self.made[i] for i in self.partial)]
        victim = data.draw(st.sampled_from(sorted(victims, key=lambda block: block.block_id)))
        self.index.remove(victim)
        self.partial.pop(victim.block_id, None)
        self.paths = {path: block for path, block in self.paths.items() if block is not victim}

    @rule(tokens=st.lists(st.integers(0, 2), max_size=3 * SIZE))
    def look_up(self, tokens: list[int]) -> None:
        for at in range(0, len(tokens) - SIZE + 1, SIZE):
            path = tuple(tokens[: at + SIZE])
            assert self.index.get(self.key_of(path)) is self.paths.get(path)
        before, rest = tuple(tokens[: len(tokens) // SIZE * SIZE]), tokens[len(tokens) // SIZE * SIZE :]
        children = [path[len(before) :] for path in self.paths if path[:-SIZE] == before]
        children += [own for start, own in self.partial.values() if start == before]
        best = max((_shared(child, rest) for child in children), default=0)
        assert self.index.longest_child(self.key_of(before), token_bytes(rest))[1] == best

    @invariant()
    def who_has_children_is_known(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == len(self.paths) + len(self.partial)
        for path, block in self.paths.items():
            grown = any(other[:-SIZE] == path for other in self.paths)
            grown |= any(start == path for start, _ in self.partial.values())
            assert block.key is not None
            assert self.index.has_child(block.key) == grown


def _shared(a: tuple[int, ...], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


@given(st.lists(st.integers(0, 1), max_size=70), st.lists(st.integers(0, 1), max_size=70))
def test_common_tokens_is_the_length_of_the_common_start(a: list[int], b: list[int]) -> None:
    assert common_tokens(token_bytes(a), token_bytes(b)) == _shared(tuple(a), b)


class TableMachine(RuleBasedStateMachine):
    """Entries of a GroupTable against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.table = GroupTable()
        self.twin: list[list[int]] = []

    @rule(block=st.integers(0, 99), rows=st.integers(1, 64), first=st.integers(0, 9), shift=st.integers(-9, 9))
    def append(self, block: int, rows: int, first: int, shift: int) -> None:
        self.table.append(block, rows, first_row=first, shift=shift)
        self.twin.append([block, first, rows, shift])

    @precondition(lambda self: self.twin)
    @rule()
    def pop(self) -> None:
        assert self.table.pop() == self.twin.pop()[0]

    @rule(keep=st.integers(0, 20))
    def replace(self, keep: int) -> None:
        self.twin = self.twin[:keep]
        self.table.replace(np.array(self.twin, np.int32))

    @rule()
    def go_on_with_a_copy(self) -> None:
        before, self.table = self.table, self.table.copy()
        before.append(77, 7)  # the copy does not notice

    @invariant()
    def same(self) -> None:
        assert self.table.entries.tolist() == self.twin
        assert self.table.num_rows == sum(entry[2] for entry in self.twin)


TableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTableMachine = TableMachine.TestCase
