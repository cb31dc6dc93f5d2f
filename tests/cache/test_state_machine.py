"""KVCache against a naive model: plain lists of tokens and rows, and a list of every prefix that was ever computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from ktransformer2.cache.advice import Pin
from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.replacement import POLICIES
from ktransformer2.errors import ConfigError
from tests.cache.factories import FULL_GROUP, WINDOW_GROUP, Clock, append, expected_rows, make_cache, read_rows, start

WINDOW_TOKENS = WINDOW_GROUP.window or 0
# Prompts are cut from few long texts, so that prefixes are shared often and at every length.
TEXTS = [[(i * i + 7 * text) % 11 for i in range(160)] for text in range(3)]
PROMPTS = st.tuples(st.sampled_from(range(3)), st.integers(1, 120), st.lists(st.integers(0, 3), max_size=20)).map(
    lambda t: TEXTS[t[0]][: t[1]] + t[2]
)


class Twin:
    """The naive twin of one table: its tokens, and per group the rows they were given when they were computed."""

    def __init__(self, table: BlockTable, tokens: list[int], rows: list[np.ndarray], plain: bool = True) -> None:
        self.table, self.tokens, self.rows, self.plain = table, tokens, rows, plain
        self.furthest = len(tokens)  # a rollback's reach counts from the most tokens the table ever held


class CacheMachine(RuleBasedStateMachine):
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Twin] = []

    @initialize(
        kv=st.sampled_from(["full", "int8"]),
        hybrid=st.booleans(),
        rollback=st.sampled_from([0, 5, 40]),
        kilobytes=st.sampled_from([300, 1000, 100_000]),
        policy=st.sampled_from(POLICIES),
    )
    def open_cache(self, kv: str, hybrid: bool, rollback: int, kilobytes: int, policy: str) -> None:
        groups = (FULL_GROUP, WINDOW_GROUP) if hybrid else (FULL_GROUP,)
        self.groups, self.clock, self.limit = groups, Clock(), kilobytes * 1000
        self.cache = make_cache(
            *groups,
            clock=self.clock,
            kv=kv,
            max_rollback_tokens=rollback,
            memory_bytes=self.limit,
            min_chunk_tokens=16,
            replacement=policy,
        )
        self.pins: list[tuple[list[int], Pin]] = []
        self.reach, self.exact_rows = rollback, kv == "full"
        self.published: list[list[int]] = []

    def longest_published(self, tokens: list[int]) -> int:
        """What a cache that forgets nothing would answer to `match`."""
        best = 0
        for known in self.published:
            shared = 0
            for a, b in zip(known, tokens[:-1], strict=False):
                if a != b:
                    break
                shared += 1
            best = max(best, shared if self.exact_rows else shared // 16 * 16)
        return best

    @rule(target=tables, tokens=PROMPTS)
    def begin(self, tokens: list[int]) -> object:
        found = self.cache.match(tokens).num_tokens
        assert found <= self.longest_published(tokens) if self.exact_rows else found % 16 == 0
        table = start(self.cache, tokens)
        if table is None:
            return multiple()
        assert table.cached_tokens <= found
        self.published.append(list(tokens))
        return self._add(Twin(table, list(tokens), [expected_rows(g, tokens) for g in self.groups]))

    @rule(twin=tables, new=st.lists(st.integers(0, 3), min_size=1, max_size=70))
    def extend(self, twin: Twin, new: list[int]) -> None:
        if twin.table.num_tokens + len(new) > 400 or not append(self.cache, twin.table, new):
            return
        tokens = twin.tokens + new
        for g, group in enumerate(self.groups):
            twin.rows[g] = np.concatenate([twin.rows[g], expected_rows(group, tokens)[len(twin.tokens) :]])
        twin.tokens = tokens
        twin.furthest = max(twin.furthest, len(tokens))
        if twin.plain:
            self.published.append(list(tokens))

    @rule(target=tables, twin=tables)
    def fork(self, twin: Twin) -> object:
        fork = Twin(self.cache.fork(twin.table), list(twin.tokens), list(twin.rows), twin.plain)
        fork.furthest = twin.furthest
        return self._add(fork)

    @rule(twin=tables, share=st.floats(0, 1))
    def rollback(self, twin: Twin, share: float) -> None:
        reach = max(0, self.reach - (twin.furthest - len(twin.tokens)))
        back = int(share * min(reach, len(twin.tokens)))
        if not twin.plain:
            return
        keep = len(twin.tokens) - back
        try:
            done = self.cache.rollback(twin.table, back)
        except ConfigError:
            # Refused only into a reused prefix: inside a sealed block, or where its window was not found.
            assert keep < twin.table.cached_tokens
            assert len(self.groups) > 1 or (not self.exact_rows and keep % 16)
            return
        if done:
            twin.tokens, twin.rows = twin.tokens[:keep], [rows[:keep] for rows in twin.rows]

    @rule(twin=tables, a=st.floats(0, 1), b=st.floats(0, 1))
    def drop(self, twin: Twin, a: float, b: float) -> None:
        start_at, stop = sorted((int(a * len(twin.tokens)), int(b * len(twin.tokens))))
        try:
            self.cache.drop(twin.table, start_at, stop)
        except ConfigError:
            # Refused only where a row that a window let go would be among the newest of what is left.
            _, held = read_rows(self.cache, twin.table, len(self.groups) - 1)
            left = np.delete(held, slice(start_at, stop))
            assert not left[max(0, len(left) - WINDOW_TOKENS + 1) :].all()
            return
        del twin.tokens[start_at:stop]
        twin.rows = [np.delete(rows, slice(start_at, stop), 0) for rows in twin.rows]
        twin.plain = False

    @rule(twin=tables, delta=st.integers(-50, 50))
    def shift(self, twin: Twin, delta: int) -> None:
        position = twin.table.next_position
        self.cache.shift(twin.table, delta)
        assert twin.table.next_position == position + delta
        twin.plain = False

    @rule(twin=tables, num_tokens=st.integers(1, 100))
    def abandon(self, twin: Twin, num_tokens: int) -> None:
        if self.cache.allocate(twin.table, num_tokens):
            self.cache.abandon(twin.table)

    @rule(twin=consumes(tables))
    def release(self, twin: Twin) -> None:
        self.cache.release(twin.table)
        self.alive.remove(twin)

    @rule(seconds=st.sampled_from([0.0, 1.0, 400.0]), finished=st.sampled_from([0, 1, 1000]))
    def maintain(self, seconds: float, finished: int) -> None:
        self.clock.now += seconds
        self.cache.maintain(finished)

    @rule(tokens=PROMPTS)
    def pin(self, tokens: list[int]) -> None:
        pin = self.cache.advice.pin(tokens)
        if pin is not None:
            self.pins.append((tokens[: pin.num_tokens], pin))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        self.cache.advice.unpin(self.pins.pop(which % len(self.pins))[1])

    @rule(tokens=PROMPTS, said=st.sampled_from(["ended", "superseded", "waiting", "live", "low", "high"]))
    def say(self, tokens: list[int], said: str) -> None:
        advice = self.cache.advice
        if said == "ended":
            advice.ended(tokens)
        elif said == "superseded":
            advice.superseded(tokens, len(tokens) // 2)
        elif said in ("waiting", "live"):
            getattr(advice, said)(tokens, 20.0)
        else:
            advice.prioritise(tokens, 1 if said == "high" else -1)

    @rule()
    def defragment(self) -> None:
        self.cache.defragment()

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    def _add(self, twin: Twin) -> Twin:
        self.alive.append(twin)
        return twin

    @invariant()
    def everything_holds(self) -> None:
        self.cache.check_integrity()
        assert self.cache.stats().peak_bytes <= self.limit
        assert self.cache.stats().pinned_bytes <= self.limit * self.cache.config.pinned_share_ratio
        for tokens, pin in self.pins:
            assert self.cache.match([*tokens, -1]).num_tokens == pin.num_tokens
        for twin in self.alive:
            assert list(twin.table.tokens) == twin.tokens
            for g, group in enumerate(self.groups):
                rows, held = read_rows(self.cache, twin.table, g)
                bound = 0.0 if self.exact_rows else 1.05 / 254
                assert np.abs(rows - twin.rows[g])[held].max(initial=0.0) <= bound
                first = 0 if group.window is None else max(0, len(twin.tokens) - group.window + 1)
                assert held[first:].all()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return  # `open_cache` itself failed
        for twin in self.alive:
            self.cache.release(twin.table)
        for _, pin in self.pins:
            self.cache.advice.unpin(pin)
        self.cache.clear()
        stats = self.cache.stats()
        assert (stats.num_blocks, stats.used_bytes, stats.cached_bytes) == (0, 0, 0)


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)


def test_a_cache_that_forgets_nothing_finds_every_published_prefix() -> None:
    """Exactly what the naive search over everything ever computed finds, at both precisions."""
    rng = np.random.default_rng(5)
    for kv in ("full", "int8"):
        published: list[list[int]] = []
        cache = make_cache(kv=kv, memory_bytes=10**9, cached_share_ratio=1.0)
        for _ in range(120):
            text, length = TEXTS[int(rng.integers(3))], int(rng.integers(1, 150))
            tokens = text[:length] + rng.integers(0, 3, int(rng.integers(0, 20))).tolist()
            best = 0
            for known in published:
                pairs = zip(known, tokens[:-1], strict=False)
                shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(tokens) - 1))
                best = max(best, shared if kv == "full" else shared // 16 * 16)
            assert cache.match(tokens).num_tokens == best
            table = start(cache, tokens)
            assert table is not None
            cache.release(table)
            published.append(tokens)
        cache.check_integrity()
