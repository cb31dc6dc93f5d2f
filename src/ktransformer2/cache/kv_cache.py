"""The cache: the only face the engine sees. Token ids and block tables in, a batch for the kernels out.

Knows no request, no model and no batching. One thread at a time owns it.

A step is `allocate` (room), `prepare` (tables for the kernels), the model, `publish` (the rows are there; full blocks
can be found). Running short is a return value: `allocate` says False and nothing has changed.

Invariants: reference counts equal the table entries that name a block; a published block never changes; the limit
`CacheConfig.memory_bytes` covers extents, page tables and copies in flight, and is never passed.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ktransformer2.cache.block import BLOCK, RELEASED, ROWS, SHIFT, BlockTable, next_key, root_key, token_bytes
from ktransformer2.cache.block_store import BlockStore
from ktransformer2.cache.explain import Explanation, Lookup, explain
from ktransformer2.cache.listing import BlockPage, list_blocks
from ktransformer2.cache.questions import Questions
from ktransformer2.cache.residency import Residency
from ktransformer2.cache.sizing import Demand, demand_bytes, longest_tokens, sealed_form
from ktransformer2.cache.stats import CacheStats, take_stats
from ktransformer2.cache.step import build_batch
from ktransformer2.cache.table_edits import TableEdits
from ktransformer2.cache.trace import CacheObserver
from ktransformer2.config import CacheConfig
from ktransformer2.errors import ConfigError, EngineClosedError
from ktransformer2.kernels.batch import KVBatch
from ktransformer2.layout import NUMERICS_VERSION, ModelGeometry
from ktransformer2.memory.arena import Arena
from ktransformer2.memory.slab import SlabPool
from ktransformer2.ownership import Owner

# Blocks freed between two looks for holes: a look costs some 10 us a run, a decode step frees no block.
_FREES_PER_LOOK = 16
# Salts whose texts `explain` looks for, by the roots of their hash chains.
_MOST_ROOTS = 64
# After a snapshot that took a second no other one is published for so many: at most 0.2 % of the time is spent on them.
_SNAPSHOT_PAUSE = 500
T = TypeVar("T")


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


class KVCache:
    """A paged, growing, prefix-sharing cache of keys and values in host memory."""

    def __init__(
        self,
        geometry: ModelGeometry,
        config: CacheConfig,
        fingerprint: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.geometry, self.config = geometry, config
        self.observer: CacheObserver | None = None  # told of every request, such as a `TraceRecorder`
        sealed = sealed_form(geometry, config)
        self._chain_start = (fingerprint, f"{NUMERICS_VERSION}/{geometry.full_form.name}/{sealed.name}")
        self._token_exact = sealed == geometry.full_form
        self._clock = clock
        self._arena = Arena(config.memory_bytes)
        stores = [BlockStore(self._arena, geometry, i, sealed, config) for i in range(len(geometry.groups))]
        self._residency = Residency(self._arena, stores, clock, config)
        self._edits = TableEdits(self._residency, config.block_tokens)
        self._tables: set[BlockTable] = set()  # those that may hold blocks; recounted by check_integrity
        self._owner = Owner("the cache")
        self._closed = False
        self._defrag_due = False
        self._frees_seen = 0
        self._last_publish_s = clock()
        self._roots: dict[bytes, None] = {}
        self._next_snapshot_s = self._last_publish_s
        self._questions: Questions[KVCache] = Questions()
        self.published = self.stats()  # replaced by `maintain`, never changed; what other threads read

    # --- finding

    def match(self, token_ids: Sequence[int], salt: bytes = b"", chain: list[bytes] | None = None) -> PrefixMatch:
        """The longest reusable prefix of `token_ids`, at most all but the last token.

        `chain`: the caller's list of this prompt's block hashes, so that none is computed twice; it is filled as far as
        was needed. Other side effects: none.
        """
        self._check_owner()
        data, size = token_bytes(token_ids[:-1]), self.config.block_tokens
        seen = self._seen_keys(data, salt, [] if chain is None else chain)
        complete = self._longest_complete(seen)
        keys, left = seen[:complete], tuple(seen[complete:])
        rest = data[4 * size * len(keys) :]
        partial = self._partial_rows(keys[-1] if keys else self._root(salt), rest)
        num_tokens = len(keys) * size + partial
        tokens = array("i", data[: 4 * num_tokens])
        return PrefixMatch(num_tokens, len(token_ids), tuple(keys), partial, tokens, left)

    def explain(
        self,
        token_ids: Sequence[int],
        salt: bytes = b"",
        match: PrefixMatch | None = None,
        *,
        across_salts: bool = True,
    ) -> Explanation:
        """Why `match`, by default what `match(token_ids, salt)` finds now, is not more. Side effects: none.

        `across_salts`: whether another salt's text may be named as the reason. That is for whoever runs the cache, not
        for those whom salts keep apart.
        """
        match, root = match or self.match(token_ids, salt), self._root(salt)
        lookup = Lookup(
            prompt_tokens=len(token_ids),
            data=token_bytes(token_ids[:-1]),
            root=root,
            keys=match.keys + match.left,
            complete=len(match.keys),
            hit_tokens=match.num_tokens,
            block_tokens=self.config.block_tokens,
            whole_blocks=not self._token_exact,
        )
        others = [other for other in self._roots if other != root] if across_salts else []
        return explain(self._residency, lookup, others, self._clock())

    def _seen_keys(self, data: bytes, salt: bytes, chain: list[bytes]) -> list[bytes]:
        """The hashes of the leading whole blocks that the cache held at any time. Side effect: `chain` grows."""
        step, seen = 4 * self.config.block_tokens, 0
        for at in range(0, len(data) - step + 1, step):
            if seen == len(chain):
                chain.append(next_key(chain[-1] if chain else self._root(salt), data[at : at + step]))
            if not self._residency.was_seen(chain[seen]):
                break  # the chain is not hashed past the first block that was never there
            seen += 1
        return chain[:seen]

    def _longest_complete(self, keys: Sequence[bytes]) -> int:
        """The most leading blocks for which every group still holds what a query behind them can see."""
        runs = []  # per group and length: how many blocks in a row, ending there, are held
        for index in self._residency.indexes:
            held = [0]
            for key in keys:
                held.append(held[-1] + 1 if index.get(key) is not None else 0)
            runs.append(held)
        for length in range(len(keys), 0, -1):
            if all(held[length] >= length - self._first_visible(g, length) for g, held in enumerate(runs)):
                return length
        return 0

    def _first_visible(self, group: int, num_blocks: int) -> int:
        """The first block that a query behind `num_blocks` full blocks can see."""
        window = self.geometry.groups[group].window
        if window is None:
            return 0
        return max(0, num_blocks * self.config.block_tokens - window + 1) // self.config.block_tokens

    def _partial_rows(self, parent: bytes, rest: bytes) -> int:
        """At model precision a match is token-exact: rows of one more block, which adoption copies."""
        if not self._token_exact or not rest:
            return 0
        return min(index.longest_child(parent, rest)[1] for index in self._residency.indexes)

    def _root(self, salt: bytes) -> bytes:
        fingerprint, plan = self._chain_start
        return root_key(fingerprint, salt, plan, self.config.block_tokens)

    # --- a step

    def new_table(self, salt: bytes = b"", publish: bool = True) -> BlockTable:
        """An empty table. `publish=False` (embeddings, soft prompts): its blocks are never found by others."""
        self._check_owner()
        root, rollback = self._root(salt), self.config.max_rollback_tokens
        self._remember(root)
        return BlockTable(len(self._residency.stores), root, publish, rollback)

    def _remember(self, root: bytes) -> None:
        """The newest salts, by their roots, so that `explain` can look at others."""
        self._roots.pop(root, None)
        self._roots[root] = None
        if len(self._roots) > _MOST_ROOTS:
            del self._roots[next(iter(self._roots))]

    def allocate(self, table: BlockTable, num_tokens: int, match: PrefixMatch | None = None) -> bool:
        """Room for `num_tokens` rows behind those the table has. False: no room, and nothing has changed.

        With `match` an empty table adopts the matched prefix first; `table.num_tokens` says how much was still there.
        """
        self._check_owner()
        assert table.pending == 0, f"{table.pending} rows are allocated already"
        self._tables.add(table)
        if match is not None:
            assert table.num_tokens == 0, f"a table with {table.num_tokens} tokens cannot adopt a prefix"
            self._adopt(table, match)
        if not (self._edits.extend(table, num_tokens) and self._charge(table, num_tokens)):
            if match is not None:
                self._reset(table)
            return False
        table.pending = num_tokens
        if match is not None:
            seen_tokens = (len(match.keys) + len(match.left)) * self.config.block_tokens
            self._residency.counters.hit_tokens += table.num_tokens
            self._residency.counters.lookup_tokens += match.prompt_tokens
            self._residency.counters.findable_tokens += max(seen_tokens, table.num_tokens)
            if self.observer is not None:
                self.observer.adopted(table, match.prompt_tokens)
        return True

    def _charge(self, table: BlockTable, num_tokens: int) -> bool:
        """Count the table itself against the limit, as it will be with `num_tokens` more. False: no room, trimmed."""
        more = table.bytes_with(num_tokens, self.config.block_tokens) - table.charged_bytes
        if more > 0 and self._residency.take(lambda: self._arena.charge(more) or None) is None:
            self._edits.trim(table, table.num_tokens)
            return False
        if more < 0:
            self._arena.discharge(-more)
        table.charged_bytes += more
        return True

    def _adopt(self, table: BlockTable, match: PrefixMatch) -> None:
        length, size = self._longest_complete(match.keys), self.config.block_tokens
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

    def prepare(self, step: Sequence[tuple[BlockTable, int]]) -> tuple[KVBatch, ...]:
        """The kernels' view of one step, one batch per layer group. `step`: tables and their allocated new rows."""
        self._check_owner()
        for table, num_new in step:
            assert table.pending == num_new, f"{num_new} new tokens, {table.pending} rows allocated"
        return tuple(build_batch(store, step, self.config.block_tokens) for store in self._residency.stores)

    def publish(self, table: BlockTable, token_ids: Sequence[int]) -> None:
        """The pending rows are computed and hold `token_ids`. Side effects: full blocks are findable and immutable."""
        self._check_owner()
        num_new = len(token_ids)
        assert num_new == table.pending, f"{num_new} tokens for {table.pending} rows"
        table.tokens.extend(token_ids)
        table.num_tokens += num_new
        table.pending = 0
        self._last_publish_s = self._clock()
        for group_table in table.groups:
            group_table.sealing.clear()
        if table.publishes:
            self._index_full_blocks(table)
        self._edits.drop_open_rows(table, num_new)
        self._edits.release_passed(table)
        self._residency.counters.computed_tokens += num_new

    def _index_full_blocks(self, table: BlockTable) -> None:
        size = self.config.block_tokens
        while (len(table.keys) + 1) * size <= table.num_tokens:
            i, parent = len(table.keys), table.tail_key()
            tokens = table.tokens[i * size : (i + 1) * size].tobytes()
            for index, store, group_table in zip(
                self._residency.indexes, self._residency.stores, table.groups, strict=True
            ):
                block_id = int(group_table.entries[i, BLOCK])
                if block_id != RELEASED and not store.block(block_id).indexed:
                    store.block(block_id).published_s = self._last_publish_s
                    index.add(store.block(block_id), parent, tokens, full=True)
            table.keys.append(next_key(parent, tokens))

    def abandon(self, table: BlockTable) -> None:
        """The step failed or was cancelled: its pending rows are forgotten."""
        self._check_owner()
        table.pending = 0
        self._edits.trim(table, table.num_tokens)

    def release(self, table: BlockTable) -> None:
        """The sequence is done: its blocks go tail first and stay findable. The table is empty afterwards."""
        self._check_owner()
        if table.pending:
            self.abandon(table)
        if self.observer is not None:
            self.observer.released(table)
        self._index_tail(table)
        self._reset(table)

    def _index_tail(self, table: BlockTable) -> None:
        """At model precision the rows of the last, partly filled block are findable too."""
        rows = table.num_tokens - len(table.keys) * self.config.block_tokens
        if not self._token_exact or not table.publishes or rows == 0:
            return
        tokens = table.tokens[-rows:].tobytes()
        for index, store, group_table in zip(
            self._residency.indexes, self._residency.stores, table.groups, strict=True
        ):
            block = store.block(int(group_table.entries[-1, BLOCK]))
            if block.references == 1 and not block.indexed:
                block.published_s = self._clock()
                index.add(block, table.tail_key(), tokens, full=False)

    def _reset(self, table: BlockTable) -> None:
        self._edits.release(table)
        self._tables.discard(table)
        self._arena.discharge(table.charged_bytes)
        table.charged_bytes = 0
        table.num_tokens = table.cached_tokens = table.position_offset = table.pending = 0
        del table.tokens[:]
        table.keys.clear()

    # --- editing a table

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; whoever appends first copies the filling block."""
        self._check_owner()
        assert table.pending == 0, f"{table.pending} rows are pending"
        other = table.copy()
        self._tables.add(other)
        for group_table, store in zip(other.groups, self._residency.stores, strict=True):
            for block_id in group_table.entries[:, BLOCK].tolist():
                if block_id != RELEASED:
                    self._residency.refer(store.block(block_id))
        return other

    def rollback(self, table: BlockTable, num_tokens: int) -> bool:
        """Take the last `num_tokens` tokens back, exactly. False: no room for the copy that a shared block needs.

        What a rollback needs is kept for `rollback_tokens` behind the most tokens the table ever held.

        Raises: ConfigError when the rows as computed, or blocks a window passed, are gone (`max_rollback_tokens`).
        """
        keep = self._start_cutting(table, num_tokens)
        if num_tokens and not (self._sees_all(table, keep) and self._refills(table, keep)):
            raise ConfigError(
                f"cannot take back {num_tokens} tokens: what that needs is kept for max_rollback_tokens="
                f"{table.rollback_tokens}; set it to the longest rollback"
            )
        return self._edits.trim(table, keep)

    def truncate(self, table: BlockTable, num_tokens: int) -> bool:
        """Take the last `num_tokens` tokens back, however many: `rollback` where that is exact.

        Elsewhere the rows that are left of the last block stay in the form they have, and later queries read them so.
        Side effects: then blocks made later are not published. False: as `rollback`.
        Raises: ConfigError when blocks that a window has passed would come into view again.
        """
        self.refuse_truncation(table, num_tokens)
        keep = table.num_tokens - num_tokens
        if num_tokens and not self._refills(table, keep):
            table.publishes = False
        return self._edits.trim(table, keep)

    def refuse_truncation(self, table: BlockTable, num_tokens: int) -> None:
        """Raises: ConfigError where `truncate` would. Side effect: what was pending is forgotten."""
        keep = self._start_cutting(table, num_tokens)
        if num_tokens and not self._sees_all(table, keep):
            raise ConfigError(
                f"cannot take back {num_tokens} tokens: layers with a sliding window have let go rows that would come "
                "into view again; begin anew, or raise max_rollback_tokens"
            )

    def _start_cutting(self, table: BlockTable, num_tokens: int) -> int:
        """How many tokens are kept."""
        self._check_owner()
        assert 0 <= num_tokens <= table.num_tokens, f"{num_tokens} of {table.num_tokens} tokens"
        if table.pending:
            self.abandon(table)
        return table.num_tokens - num_tokens

    def _sees_all(self, table: BlockTable, keep: int) -> bool:
        """Whether every block that a query behind `keep` tokens sees is still there."""
        for group_table, store in zip(table.groups, self._residency.stores, strict=True):
            entries, ends = group_table.entries, np.cumsum(group_table.entries[:, ROWS])
            window = store.group.window
            first = 0 if window is None else int(np.searchsorted(ends, keep - window + 1, side="right"))
            cut = int(np.searchsorted(ends, keep, side="left"))
            if keep and (entries[first : cut + 1, BLOCK] == RELEASED).any():
                return False
        return True

    def _refills(self, table: BlockTable, keep: int) -> bool:
        """Whether the block that is cut at `keep` tokens has its rows as computed, so that it fills again."""
        for group_table, store in zip(table.groups, self._residency.stores, strict=True):
            entries, ends = group_table.entries, np.cumsum(group_table.entries[:, ROWS])
            cut = int(np.searchsorted(ends, keep, side="left"))
            if keep and ends[cut] != keep:
                block = store.block(int(entries[cut, BLOCK]))
                if not block.open_extent and int(entries[cut, ROWS]) == self.config.block_tokens:
                    return False
        return True

    def shift(self, table: BlockTable, delta: int) -> None:
        """Move everything the table holds by `delta` positions; the next token's position moves along.

        Keys are not touched: the kernel turns the query back. Side effects: blocks made later are not published.
        Raises: ConfigError for a model whose rotary embedding cannot be shifted.
        """
        self._start_moving(table)
        self._edits.close_last(table)
        for group_table in table.groups:
            group_table.entries[:, SHIFT] += delta
        table.position_offset += delta

    def drop(self, table: BlockTable, start: int, stop: int) -> None:
        """Tokens [start, stop) leave the context; what follows closes up by a shift. Approximate: the caller's choice.

        Side effects: blocks made later are not published.
        Raises: ConfigError for a model whose rotary embedding cannot be shifted, and where a sliding window would see
        again what it has let go; nothing has changed then.
        """
        assert 0 <= start <= stop <= table.num_tokens, f"[{start}, {stop}) of {table.num_tokens} tokens"
        self._check_owner()
        if self._edits.bares_released(table, start, stop):
            raise ConfigError(
                f"cannot drop tokens {start} to {stop}: layers with a sliding window have let go rows before them that "
                "would come into view again; drop tokens that all windows have passed"
            )
        self._start_moving(table)
        self._edits.cut(table, start, stop)
        del table.tokens[start:stop]
        del table.keys[start // self.config.block_tokens :]
        table.num_tokens -= stop - start

    def _start_moving(self, table: BlockTable) -> None:
        self._check_owner()
        assert table.pending == 0, f"{table.pending} rows are pending"
        if self.geometry.shift_refused:
            raise ConfigError(f"positions of this model cannot be moved: {self.geometry.shift_refused}")
        table.publishes = False

    # --- between steps

    def maintain(self, finished_requests: int = 0) -> None:
        """Spend a bounded budget: let idle and surplus blocks go, check for a shrink, defragment when due.

        Side effects: now and then `published` is a new snapshot; one question of another thread is answered.
        """
        self._check_owner()
        counters, config, now = self._residency.counters, self.config, self._clock()
        share = int(config.cached_share_ratio * config.memory_bytes)
        self._residency.evict_past(share)
        idle = now - self._last_publish_s >= config.cached_idle_s
        for pool in self._pools():
            pool.shrink()
        if idle and any(pool.reclaimable_bytes for pool in self._pools()):
            self._give_back()  # nothing came for so long that no chunk is kept for it either
        counters.requests_since_defrag += finished_requests
        self._defrag_due |= counters.requests_since_defrag >= config.defrag_interval_requests
        frees = sum(pool.stats.frees for pool in self._pools())
        if frees - self._frees_seen >= _FREES_PER_LOOK:  # only frees make holes
            self._frees_seen = frees
            self._defrag_due |= any(p.fragmentation_ratio > config.max_fragmentation_ratio for p in self._pools())
        if self._defrag_due:
            self._defrag_due = self._defragment(config.maintain_bytes) > 0
        self._publish_figures()
        self._questions.answer_one(self)

    def _publish_figures(self) -> None:
        """Now and then, and whenever nothing runs, so that the last snapshot before a rest has all of it."""
        began = self._clock()
        if began >= self._next_snapshot_s or not self._tables:
            self.published = self.stats()
            self._next_snapshot_s = began + _SNAPSHOT_PAUSE * (self._clock() - began)

    def defragment(self) -> int:
        """Compact everything now, whatever it takes; bytes moved."""
        self._check_owner()
        return self._defragment(2 * self.config.memory_bytes)

    def _defragment(self, budget_bytes: int) -> int:
        counters = self._residency.counters
        moved = 0
        for g, store in enumerate(self._residency.stores):
            chains = [
                [store.block(i) for i in table.groups[g].entries[:, BLOCK].tolist() if i != RELEASED]
                for table in self._tables
            ]
            moved += store.defragment(budget_bytes - moved, chains)
        counters.moved_bytes += moved
        counters.defrag_runs += 1
        if moved == 0:
            counters.requests_since_defrag = 0
        return moved

    def clear(self) -> int:
        """Free every block that nobody uses and give the memory back to the system; bytes given back."""
        self._check_owner()
        before = self._arena.stats.committed_bytes
        self._residency.evict_all()
        self._give_back()
        return before - self._arena.stats.committed_bytes

    def _give_back(self) -> None:
        for pool in self._pools():
            pool.trim()
        for store in self._residency.stores:
            store.shrink_tables()

    # --- figures

    def stats(self) -> CacheStats:
        """One frozen snapshot of every figure, taken now. Other threads read `published`."""
        return take_stats(self._arena, self._residency, list(self._tables), self._clock())

    def published_age_s(self) -> float:
        """How old `published` is. Any thread may ask."""
        return self._clock() - self.published.taken_s

    def list_blocks(self, start: int = 0, limit: int = 100) -> BlockPage:
        """At most `limit` blocks from place `start` on, one by one."""
        self._check_owner()
        return list_blocks(self._residency.stores, self._clock(), start, limit)

    def ask(self, question: Callable[[KVCache], T]) -> Future[T]:
        """From any thread: the owner calls `question` with this cache in a coming `maintain`; cancel it to withdraw.

        It should read only, and not for long. Raises: QueueFullError, EngineClosedError; the future, what it raises.
        """
        return self._questions.add(question)

    def resident_bytes(self) -> int:
        """What the system counts as resident of the cache's address range."""
        return self._arena.resident_bytes()

    def bytes_for(self, num_tokens: int, chunk_tokens: int = 0) -> int:
        """The most bytes one sequence of `num_tokens` needs, its filling block and page tables included.

        `chunk_tokens`: the largest step; a windowed group holds a step's rows whole before the window passes them.
        """
        demand = Demand(num_tokens, chunk_tokens)
        return demand_bytes(self.geometry, self.config, demand, self._page_tables()).total

    def capacity_tokens(self, chunk_tokens: int = 0) -> int:
        """The most tokens that one sequence can hold under the limit, read in steps of `chunk_tokens`."""
        return longest_tokens(self.geometry, self.config, Demand(0, chunk_tokens), self._page_tables())

    def _page_tables(self) -> list[int]:
        return [store.table_bytes() for store in self._residency.stores]

    def check_integrity(self) -> None:
        """Recount everything; an assertion names what differs. For tests and simulations: O(blocks)."""
        self._residency.check_integrity()
        self._arena.check_integrity()
        named: Counter[tuple[int, int]] = Counter()
        for table in self._tables:
            for g, group_table in enumerate(table.groups):
                assert group_table.num_rows == table.num_tokens + table.pending, (
                    f"group {g}: {group_table.num_rows} rows, {table.num_tokens} tokens, {table.pending} pending"
                )
                named.update(
                    (g, block_id) for block_id in group_table.entries[:, BLOCK].tolist() if block_id != RELEASED
                )
        for g, store in enumerate(self._residency.stores):
            for block in store.live_blocks():
                count = named.pop((g, block.block_id), 0)
                assert block.references == count, f"{block} is named by {count} entries"
        assert not named, f"entries name free blocks: {sorted(named)}"

    def hand_over(self) -> None:
        """The cache belongs to the next thread that uses it. For the owner to call between two steps."""
        self._owner.hand_over()

    def charge(self, num_bytes: int) -> bool:
        """Count bytes of the caller's own, such as a gathered view, against the limit. False: no room for them."""
        self._check_owner()
        return self._residency.take(lambda: self._arena.charge(num_bytes) or None) is not None

    def discharge(self, num_bytes: int) -> None:
        """The caller's bytes are gone."""
        self._arena.discharge(num_bytes)

    @property
    def closed(self) -> bool:
        """Whether `close` was called. Any thread may ask."""
        return self._closed

    def close(self) -> None:
        """Give everything back. Tables made by this cache must not be used afterwards."""
        if not self._closed:
            self._closed = True
            self._questions.close()
            self._arena.close()

    def _pools(self) -> list[SlabPool]:
        return [pool for store in self._residency.stores for pool in store.pools]

    def _check_owner(self) -> None:
        """Raises: OwnershipError from a second thread or a forked child; EngineClosedError after close()."""
        self._owner.check()
        if self._closed:
            raise EngineClosedError("the cache was closed; make a new one")
