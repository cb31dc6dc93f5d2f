"""The cache: the only face the engine sees. Token ids and block tables in, a batch for the kernels out.

Knows no request, no model and no batching. One thread at a time owns it.

A step is `allocate` (room), `prepare` (tables for the kernels), the model, `publish` (the rows are there; full blocks
can be found). Running short is a return value: `allocate` says False and nothing has changed.

Invariants: reference counts equal the table entries that name a block; a published block never changes; the limit
`CacheConfig.memory_bytes` covers extents, page tables and copies in flight, and is never passed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from ktransformer2.cache.advice import Advice
from ktransformer2.cache.block import BLOCK, RELEASED, SHIFT, Block, BlockTable
from ktransformer2.cache.block_store import BlockStore
from ktransformer2.cache.cuts import refills, sees_all
from ktransformer2.cache.explain import Explanation
from ktransformer2.cache.listing import BlockPage, list_blocks
from ktransformer2.cache.lower import LowerStats, LowerTiers, lineage_of
from ktransformer2.cache.prefixes import Prefixes, PrefixMatch
from ktransformer2.cache.promotion import Fetch, Turn
from ktransformer2.cache.questions import Questions
from ktransformer2.cache.residency import Residency
from ktransformer2.cache.sizing import Demand, demand_bytes, longest_tokens, sealed_form
from ktransformer2.cache.stats import CacheStats, take_stats
from ktransformer2.cache.step import build_batch
from ktransformer2.cache.table_edits import TableEdits
from ktransformer2.cache.trace import CacheObserver
from ktransformer2.cache.upkeep import Upkeep
from ktransformer2.config import CacheConfig, TierConfig
from ktransformer2.errors import ConfigError, EngineClosedError
from ktransformer2.kernels.batch import KVBatch
from ktransformer2.layout import ModelGeometry
from ktransformer2.memory.arena import Arena
from ktransformer2.ownership import Owner
from ktransformer2.tiers.tier import Lineage, Tier

# After a snapshot that took a second no other one is published for so many: at most 0.2 % of the time is spent on them.
_SNAPSHOT_PAUSE = 500
T = TypeVar("T")


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
        self._fingerprint, self._clock = fingerprint, clock
        self._lower: LowerTiers | None = None
        self._arena = Arena(config.memory_bytes)
        stores = [BlockStore(self._arena, geometry, i, sealed, config) for i in range(len(geometry.groups))]
        self._residency = Residency(self._arena, stores, clock, config)
        self._edits = TableEdits(self._residency, config.block_tokens)
        self._prefixes = Prefixes(self._edits, self._residency, geometry, config, fingerprint)
        self._tables: set[BlockTable] = set()  # those that may hold blocks; recounted by check_integrity
        self._upkeep = Upkeep(self._arena, self._residency, self._tables, config)
        self._owner = Owner("the cache")
        self.advice = Advice(self._prefixes, self._residency, config, self._owner)  # what callers know of texts
        self._closed = False
        self._last_publish_s = clock()
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
        return self._prefixes.match(token_ids, salt, [] if chain is None else chain)

    def explain(
        self,
        token_ids: Sequence[int],
        salt: bytes = b"",
        match: PrefixMatch | None = None,
        *,
        across_salts: bool = True,
    ) -> Explanation:
        """Why `match`, by default what `match(token_ids, salt)` finds now, is not more. Side effects: none.

        `token_ids`: the prompt, under its `salt`. `across_salts`: whether another salt's text may be named as the
        reason. That is for whoever runs the cache, not for those whom salts keep apart.
        """
        match = match or self.match(token_ids, salt)
        found = self._prefixes.explain(token_ids, salt, match, self._clock(), across_salts=across_salts)
        behind = None if self._lower is None else self._prefixes.key_behind(token_ids, match, salt)
        tier = "" if behind is None or self._lower is None else self._lower.where(behind)
        return dataclasses.replace(found, tier=tier)

    # --- tiers below the device

    @property
    def lineage(self) -> Lineage:
        """What this cache's blocks have in common wherever they lie. Raises: ConfigError without a fingerprint."""
        return lineage_of(self.geometry, self.config, self._fingerprint)

    def join(self, tiers: Sequence[Tier], config: TierConfig) -> None:
        """Blocks go down to `tiers`, nearest first, and come up from there, from now on. `close` closes them.

        Raises: ConfigError without a fingerprint, and where tiers have joined already.
        """
        self._check_owner()
        if self._lower is not None:
            raise ConfigError("tiers have joined this cache already; give all of them at once")
        assert self.lineage, "it raises without a fingerprint"
        self._lower = LowerTiers(self._residency, self._arena, tiers, config, self._clock)

    def fetch(
        self, token_ids: Sequence[int], salt: bytes = b"", chain: list[bytes] | None = None, turn: Turn = ()
    ) -> Fetch | None:
        """Begin to bring up what tiers have of a prompt and the device has not. None: nothing, or it is not worth it.

        `chain`: as in `match`. `turn`: where several prompts wait, less goes first, and takes no harm from those behind
        it. What came is found by `match`, so there is nothing to be done with it.
        """
        self._check_owner()
        if self._lower is None:
            return None
        share = int(self.config.cached_share_ratio * self.config.memory_bytes)  # of more than that nothing would stay
        wanted, num_tokens = self._prefixes.below(token_ids, salt, [] if chain is None else chain, self._lower, share)
        return self._lower.begin(wanted, num_tokens, turn) if wanted else None

    @property
    def num_evicted(self) -> int:
        """Blocks evicted so far. While it is the same, what was found or fetched is still there."""
        return sum(self._residency.counters.evictions.values())

    def is_loading(self, fetch: Fetch) -> bool:
        """Whether a prompt whose turn has come should wait for its blocks a little longer; that has an end."""
        return self._lower is not None and self._lower.is_loading(fetch)

    def end_fetch(self, fetch: Fetch) -> None:
        """Its prompt has had its turn, or is gone."""
        if self._lower is not None and not self._closed:
            self._lower.end_fetch(fetch)

    def receive(self) -> None:
        """Take what came up from tiers; the start of a step."""
        self._check_owner()
        if self._lower is not None:
            self._lower.receive()

    def wait_for_tiers(self, limit_s: float) -> None:
        """Sleep until something came up, at most `limit_s`."""
        if self._lower is not None:
            self._lower.wait(limit_s)
            self._lower.copy(self.config.maintain_bytes)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step read so many tokens of prompts in that time: what loading them is compared with."""
        if self._lower is not None:
            self._lower.computed(num_tokens, seconds, self._clock())

    @property
    def staged_bytes(self) -> int:
        """Copies on their way to and from tiers, which count against the limit."""
        return 0 if self._lower is None else self._lower.staged_bytes

    def tier_stats(self) -> LowerStats | None:
        """What the tiers have done; after `close` as it was then. None: there are none."""
        return None if self._lower is None else self._lower.stats()

    # --- a step

    def new_table(self, salt: bytes = b"", publish: bool = True) -> BlockTable:
        """An empty table. `publish=False` (embeddings, soft prompts): its blocks are never found by others."""
        self._check_owner()
        root = self._prefixes.root(salt)
        self._prefixes.remember(root)
        return BlockTable(len(self._residency.stores), root, publish, self.config.max_rollback_tokens)

    def allocate(self, table: BlockTable, num_tokens: int, match: PrefixMatch | None = None) -> bool:
        """Room for `num_tokens` rows behind those the table has. False: no room, and nothing has changed.

        With `match` an empty table adopts the matched prefix first; `table.num_tokens` says how much was still there.
        """
        self._check_owner()
        assert table.pending == 0, f"{table.pending} rows are allocated already"
        self._tables.add(table)
        if match is not None:
            assert table.num_tokens == 0, f"a table with {table.num_tokens} tokens cannot adopt a prefix"
            self._prefixes.adopt(table, match)
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
            if self._lower is not None:
                table.restored_tokens = self._lower.found(self._blocks_of(table))
            if self.observer is not None:
                self.observer.adopted(table, match.prompt_tokens)
        return True

    def _blocks_of(self, table: BlockTable) -> Iterator[Block]:
        """The blocks of the prefix that a table has adopted."""
        for store, group_table in zip(self._residency.stores, table.groups, strict=True):
            for block_id in group_table.entries[: len(table.keys), BLOCK].tolist():
                if block_id != RELEASED:
                    yield store.block(block_id)

    def _charge(self, table: BlockTable, num_tokens: int) -> bool:
        """Count the table itself against the limit, as it will be with `num_tokens` more. False: no room, trimmed."""
        more = table.bytes_with(num_tokens, self.config.block_tokens) - table.charged_bytes
        if more == 0:
            return True
        if more > 0 and not self._residency.charge(more):
            self._edits.trim(table, table.num_tokens)
            return False
        if more < 0:
            self._arena.discharge(-more)
        table.charged_bytes += more
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
            self._prefixes.index_full_blocks(table, self._last_publish_s)
        self._edits.drop_open_rows(table, num_new)
        self._edits.release_passed(table)
        self._residency.counters.computed_tokens += num_new

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
        self._prefixes.index_tail(table, self._clock())
        self._reset(table)

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

        What a rollback needs is kept for `rollback_tokens` behind the most tokens the table ever held; of a reused
        prefix (`table.cached_tokens`) only what was found: its sealed blocks as wholes, and a window's newest ones.

        Raises: ConfigError when the rows as computed, or blocks a window passed, are gone (`max_rollback_tokens`).
        """
        keep, stores = self._start_cutting(table, num_tokens), self._residency.stores
        exact = sees_all(table, stores, keep) and refills(table, stores, keep, self.config.block_tokens)
        if num_tokens and not exact:
            raise ConfigError(
                f"cannot take back {num_tokens} of {table.num_tokens} tokens exactly: what that needs is kept for "
                f"max_rollback_tokens={table.rollback_tokens} behind the newest, less those of the reused prefix "
                f"({table.cached_tokens} tokens); raise it to the longest rollback, or begin anew"
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
        if num_tokens and not refills(table, self._residency.stores, keep, self.config.block_tokens):
            table.publishes = False
        return self._edits.trim(table, keep)

    def refuse_truncation(self, table: BlockTable, num_tokens: int) -> None:
        """Raises: ConfigError where `truncate` would. Side effect: what was pending is forgotten."""
        keep = self._start_cutting(table, num_tokens)
        if num_tokens and not sees_all(table, self._residency.stores, keep):
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
        if self._lower is not None:
            self._lower.copy(self.config.maintain_bytes)
        self._upkeep.maintain(finished_requests, self._clock() - self._last_publish_s)
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
        return self._upkeep.defragment(2 * self.config.memory_bytes)

    def clear(self) -> int:
        """Free every block that nobody uses and give the memory back to the system; bytes given back."""
        self._check_owner()
        before = self._arena.stats.committed_bytes
        self._residency.evict_all()
        self._upkeep.give_back()
        return before - self._arena.stats.committed_bytes

    # --- figures

    def stats(self) -> CacheStats:
        """One frozen snapshot of every figure, taken now. Other threads read `published`."""
        lower = LowerStats() if self._lower is None else self._lower.stats()
        return take_stats(self._arena, self._residency, list(self._tables), lower, self._clock())

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
        self._upkeep.check_integrity()
        if self._lower is not None:
            self._lower.check_integrity()

    def hand_over(self) -> None:
        """The cache belongs to the next thread that uses it. For the owner to call between two steps."""
        self._owner.hand_over()

    def charge(self, num_bytes: int) -> bool:
        """Count bytes of the caller's own, such as a gathered view, against the limit. False: no room for them."""
        self._check_owner()
        return self._residency.charge(num_bytes)

    def discharge(self, num_bytes: int) -> None:
        """The caller's bytes are gone."""
        self._arena.discharge(num_bytes)

    @property
    def closed(self) -> bool:
        """Whether `close` was called. Any thread may ask."""
        return self._closed

    def close(self) -> None:
        """Full blocks go down to tiers, at most `flush_s` long; then everything is given back.

        Tables made by this cache must not be used afterwards.
        """
        if self._closed:
            return
        try:
            if self._lower is not None:
                self._lower.end()
        finally:
            self._closed = True
            self.advice.end()
            self._questions.close()
            self._arena.close()

    def _check_owner(self) -> None:
        """Raises: OwnershipError from a second thread or a forked child; EngineClosedError after close()."""
        self._owner.check()
        if self._closed:
            raise EngineClosedError("the cache was closed; make a new one")
