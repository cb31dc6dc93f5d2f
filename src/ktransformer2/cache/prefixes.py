"""Which prefixes can be found: from token ids to blocks by the hash chain, and back into the index. For `KVCache` only.

Knows no step and no budget. A hit ends where every layer group still holds what a query behind it sees; at model
precision it goes on into the rows of one more block, which adoption copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ktransformer2.cache.block import BLOCK, RELEASED, Block, BlockTable, next_key, root_key, token_bytes
from ktransformer2.cache.demotion import KnownKeys
from ktransformer2.cache.explain import Explanation, Lookup, explain
from ktransformer2.cache.lower import LowerTiers
from ktransformer2.cache.promotion import Wanted
from ktransformer2.cache.residency import Residency
from ktransformer2.cache.sizing import sealed_form
from ktransformer2.cache.table_edits import TableEdits
from ktransformer2.config import CacheConfig
from ktransformer2.layout import NUMERICS_VERSION, ModelGeometry

# Salts whose texts `explain` looks for, by the roots of their hash chains.
_MOST_ROOTS = 64


@dataclass(frozen=True)
class PrefixMatch:
    """What the cache holds of a prompt: whole blocks by key, then `partial_tokens` rows of one more block.

    `left`: the keys of the whole blocks behind those that it held at some time, as long as that is remembered.
    """

    num_tokens: int
    prompt_tokens: int
    keys: tuple[bytes, ...] = ()
    partial_tokens: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"), repr=False)
    left: tuple[bytes, ...] = ()


class Prefixes:
    """The hash chains of one cache: one model, one plan, any number of salts."""

    def __init__(
        self, edits: TableEdits, residency: Residency, geometry: ModelGeometry, config: CacheConfig, fingerprint: bytes
    ) -> None:
        self._residency, self._edits = residency, edits
        self._windows = tuple(group.window for group in geometry.groups)
        self._block_tokens = config.block_tokens
        sealed = sealed_form(geometry, config)
        self._token_exact = sealed == geometry.full_form
        self._chain_start = (fingerprint, f"{NUMERICS_VERSION}/{geometry.full_form.name}/{sealed.name}")
        self._roots: dict[bytes, None] = {}
        self._passed = KnownKeys()  # what lies below and no window sees: on the way to what was brought up

    def root(self, salt: bytes) -> bytes:
        """Where the hash chain of a salt begins."""
        fingerprint, plan = self._chain_start
        return root_key(fingerprint, salt, plan, self._block_tokens)

    def remember(self, root: bytes) -> None:
        """The newest salts, by their roots, so that `explain` can look at others."""
        self._roots.pop(root, None)
        self._roots[root] = None
        if len(self._roots) > _MOST_ROOTS:
            del self._roots[next(iter(self._roots))]

    # --- finding

    def match(self, token_ids: Sequence[int], salt: bytes, chain: list[bytes]) -> PrefixMatch:
        """As `KVCache.match`. Side effect: `chain` is filled as far as was needed."""
        data, size = token_bytes(token_ids[:-1]), self._block_tokens
        was_seen = self._residency.was_seen
        seen = self._leading_keys(data, salt, chain, lambda key: was_seen(key) or key in self._passed)
        complete = self._longest_complete(seen)
        keys, left = seen[:complete], tuple(key for key in seen[complete:] if was_seen(key))
        rest = data[4 * size * len(keys) :]
        partial = self._partial_rows(keys[-1] if keys else self.root(salt), rest)
        num_tokens = len(keys) * size + partial
        tokens = array("i", data[: 4 * num_tokens])
        return PrefixMatch(num_tokens, len(token_ids), tuple(keys), partial, tokens, left)

    def explain(
        self, token_ids: Sequence[int], salt: bytes, match: PrefixMatch, now: float, *, across_salts: bool
    ) -> Explanation:
        """As `KVCache.explain`."""
        root = self.root(salt)
        lookup = Lookup(
            prompt_tokens=len(token_ids),
            data=token_bytes(token_ids[:-1]),
            root=root,
            keys=match.keys + match.left,
            complete=len(match.keys),
            hit_tokens=match.num_tokens,
            block_tokens=self._block_tokens,
            whole_blocks=not self._token_exact,
        )
        others = [other for other in self._roots if other != root] if across_salts else []
        return explain(self._residency, lookup, others, now)

    def below(
        self, token_ids: Sequence[int], salt: bytes, chain: list[bytes], lower: LowerTiers, most_bytes: int
    ) -> tuple[list[Wanted], int]:
        """Blocks that lie below, as far as filters know, and with which `match` would find more; how many tokens more.

        Parents first, group by group, at most `most_bytes`. Side effect: `chain` is filled as far as was needed.
        """
        data, indexes = token_bytes(token_ids[:-1]), self._residency.indexes

        def is_near(key: bytes) -> bool:
            return any(index.get(key) is not None or lower.may_hold(g, key) for g, index in enumerate(indexes))

        keys = self._leading_keys(data, salt, chain, is_near)
        here = [[index.get(key) is not None for key in keys] for index in indexes]
        near = [
            [is_here or lower.may_hold(g, key) for is_here, key in zip(held, keys, strict=True)]
            for g, held in enumerate(here)
        ]
        found, length = self._longest_run(here), self._longest_run(near)
        while length > found:
            missing = [
                (g, i)
                for g, held in enumerate(here)
                for i in range(self._first_visible(g, length), length)
                if not held[i]
            ]
            excess = sum(self._residency.stores[g].sealed_layout.extent_bytes for g, _ in missing) - most_bytes
            if excess <= 0:
                wanted = [self._wanted(g, i, keys, data, salt) for g, i in missing]
                if None not in self._windows:  # else a group without a window has all of them
                    for key in keys[:length]:
                        self._passed.add(key)
                return wanted, (length - found) * self._block_tokens
            shorter = length - max(1, excess // sum(s.sealed_layout.extent_bytes for s in self._residency.stores))
            length = self._longest_run([held[: max(0, shorter)] for held in near])
        return [], 0

    def key_behind(self, token_ids: Sequence[int], match: PrefixMatch, salt: bytes) -> bytes | None:
        """The hash of the whole block behind those of a match. None: the prompt has no such block."""
        data, at = token_bytes(token_ids[:-1]), 4 * self._block_tokens * len(match.keys)
        tokens = data[at : at + 4 * self._block_tokens]
        whole = len(tokens) == 4 * self._block_tokens
        return next_key(match.keys[-1] if match.keys else self.root(salt), tokens) if whole else None

    def _wanted(self, group: int, i: int, keys: Sequence[bytes], data: bytes, salt: bytes) -> Wanted:
        """The i-th block of a prompt."""
        step = 4 * self._block_tokens
        parent = keys[i - 1] if i else self.root(salt)
        return Wanted(group, keys[i], parent, data[i * step : (i + 1) * step], begins=i == 0)

    def held(self, token_ids: Sequence[int], salt: bytes) -> tuple[list[Block], int]:
        """The whole blocks of the longest prefix that is held, in all groups as far as a query behind it sees, head
        first; and how many tokens that prefix has.
        """
        keys = self.seen_keys(token_bytes(token_ids), salt, [])
        length = self._longest_complete(keys)
        blocks: list[Block] = []
        for g, index in enumerate(self._residency.indexes):
            found = (index.get(key) for key in keys[self._first_visible(g, length) : length])
            blocks += [block for block in found if block is not None]
        return blocks, length * self._block_tokens

    def seen_keys(self, data: bytes, salt: bytes, chain: list[bytes]) -> list[bytes]:
        """The hashes of the leading whole blocks that the cache held at any time. Side effect: `chain` grows."""
        return self._leading_keys(data, salt, chain, self._residency.was_seen)

    def _leading_keys(
        self, data: bytes, salt: bytes, chain: list[bytes], is_known: Callable[[bytes], bool]
    ) -> list[bytes]:
        """The hashes of the leading whole blocks that are known. Side effect: `chain` grows."""
        step, seen = 4 * self._block_tokens, 0
        for at in range(0, len(data) - step + 1, step):
            if seen == len(chain):
                chain.append(next_key(chain[-1] if chain else self.root(salt), data[at : at + step]))
            if not is_known(chain[seen]):
                break  # the chain is not hashed past the first block that was never there
            seen += 1
        return chain[:seen]

    def _longest_complete(self, keys: Sequence[bytes]) -> int:
        """The most leading blocks for which every group still holds what a query behind them can see."""
        return self._longest_run([[index.get(key) is not None for key in keys] for index in self._residency.indexes])

    def _longest_run(self, held: Sequence[Sequence[bool]]) -> int:
        """The most leading blocks so that in every group what a query behind them can see is held. `held` by group."""
        runs = []  # per group and length: how many blocks in a row, ending there, are held
        for flags in held:
            run = [0]
            for is_held in flags:
                run.append(run[-1] + 1 if is_held else 0)
            runs.append(run)
        for length in range(len(held[0]), 0, -1):
            if all(run[length] >= length - self._first_visible(g, length) for g, run in enumerate(runs)):
                return length
        return 0

    def _first_visible(self, group: int, num_blocks: int) -> int:
        """The first block that a query behind `num_blocks` full blocks can see."""
        window = self._windows[group]
        if window is None:
            return 0
        return max(0, num_blocks * self._block_tokens - window + 1) // self._block_tokens

    def _partial_rows(self, parent: bytes, rest: bytes) -> int:
        """At model precision a match is token-exact: rows of one more block, which adoption copies."""
        if not self._token_exact or not rest:
            return 0
        return min(index.longest_child(parent, rest)[1] for index in self._residency.indexes)

    # --- adopting

    def adopt(self, table: BlockTable, match: PrefixMatch) -> None:
        """An empty table names the blocks of `match` that are still there, and copies the rows of the last one."""
        length, size = self._longest_complete(match.keys), self._block_tokens
        for g, group_table in enumerate(table.groups):
            index, first = self._residency.indexes[g], self._first_visible(g, length)
            for i, key in enumerate(match.keys[:length]):
                block = index.get(key) if i >= first else None
                if block is not None:
                    self._residency.refer(block)
                group_table.append(RELEASED if block is None else block.block_id, size)
        table.keys = list(match.keys[:length])
        table.num_tokens = length * size
        if match.partial_tokens and length == len(match.keys) and self._adopt_partial(table, match):
            table.num_tokens = match.num_tokens
        table.tokens.extend(match.tokens[: table.num_tokens])
        table.cached_tokens = table.num_tokens

    def _adopt_partial(self, table: BlockTable, match: PrefixMatch) -> bool:
        """Copy the matched rows of one more block. False: no room for the copy, so they are computed instead."""
        rest, rows = match.tokens[-match.partial_tokens :].tobytes(), match.partial_tokens
        for index, store, group_table in zip(
            self._residency.indexes, self._residency.stores, table.groups, strict=True
        ):
            source, shared = index.longest_child(table.tail_key(), rest)
            if source is None or shared < rows or not self._edits.append_copy(group_table, store, source, rows):
                self._edits.trim(table, table.num_tokens)
                return False
        return True

    # --- indexing

    def index_full_blocks(self, table: BlockTable, now: float) -> None:
        """What the table holds in full blocks can be found. `now`: seconds, when that was."""
        size = self._block_tokens
        while (len(table.keys) + 1) * size <= table.num_tokens:
            i, parent = len(table.keys), table.tail_key()
            tokens = table.tokens[i * size : (i + 1) * size].tobytes()
            for index, store, group_table in zip(
                self._residency.indexes, self._residency.stores, table.groups, strict=True
            ):
                block_id = int(group_table.entries[i, BLOCK])
                block = None if block_id == RELEASED else store.block(block_id)
                if block is not None and not block.indexed:
                    block.published_s, block.begins = now, i == 0
                    if index.add(block, parent, tokens, full=True) and self._residency.listener is not None:
                        self._residency.listener.filled(block)
            table.keys.append(next_key(parent, tokens))

    def index_tail(self, table: BlockTable, now: float) -> None:
        """At model precision the rows of the last, partly filled block are findable too."""
        rows = table.num_tokens - len(table.keys) * self._block_tokens
        if not self._token_exact or not table.publishes or rows == 0:
            return
        tokens = table.tokens[-rows:].tobytes()
        for index, store, group_table in zip(
            self._residency.indexes, self._residency.stores, table.groups, strict=True
        ):
            block = store.block(int(group_table.entries[-1, BLOCK]))
            if block.references == 1 and not block.indexed:
                block.published_s = now
                index.add(block, table.tail_key(), tokens, full=False)
