"""The figures beside a naive recount: everything counted again from what can be seen from outside, step by step."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ktransformer2.cache.block import Block, BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.stats import AGE_BOUNDS_S, AgeHistogram, CacheStats
from ktransformer2.errors import ConfigError
from tests.cache.factories import FULL_GROUP, WINDOW_GROUP, Clock, append, make_cache, start

BLOCK = 16
QUANTILES = {"0.5": 0.5, "0.9": 0.9, "1": 1.0}
TEXTS = [[(i * i + 7 * text) % 11 for i in range(300)] for text in range(4)]


class Recount:
    """A cache under observation. What it counts, is counted here from tokens, tables and the index before and after."""

    def __init__(self, cache: KVCache, clock: Clock) -> None:
        self.cache, self.clock = cache, clock
        self.totals: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.lifetimes: list[float] = []
        self.idle: list[float] = []
        self.texts: dict[bytes, list[list[int]]] = {}
        self.since: dict[Block, float] = {}
        self.unused_since: dict[Block, float] = {}
        self._count_calls("commit", "decommit")

    def _count_calls(self, *names: str) -> None:
        for name in names:
            inner = getattr(self.cache._arena, name)

            def counted(*args: Any, _inner: Any = inner, _name: str = name) -> Any:
                granted = _inner(*args)
                self.calls[_name] += granted is not False
                return granted

            setattr(self.cache._arena, name, counted)

    def begin(self, tokens: list[int], salt: bytes) -> BlockTable | None:
        known = max((shared(text, tokens[:-1]) for text in self.texts.get(salt, [])), default=0)
        table = start(self.cache, tokens, salt)
        if table is None:  # no room, and nothing is counted but what had to go for it in vain
            self.look("room")
            return None
        self.totals["lookup_tokens"] += len(tokens)
        self.totals["hit_tokens"] += table.cached_tokens
        self.totals["findable_tokens"] += max(known // BLOCK * BLOCK, table.cached_tokens)
        self.totals["computed_tokens"] += len(tokens) - table.cached_tokens
        self.texts.setdefault(salt, []).append(list(tokens))
        self.look("room")
        return table

    def extend(self, table: BlockTable, new: list[int], salt: bytes) -> None:
        if append(self.cache, table, new):
            self.totals["computed_tokens"] += len(new)
            self.texts[salt].append(list(table.tokens))
        self.look("room")

    def look(self, cause: str = "") -> None:
        """After every call: what is no longer in the index was evicted, for `cause` or, in a maintain, as idle."""
        residency, now = self.cache._residency, self.clock.now
        indexed = {block for index in residency.indexes for block in index}
        for block in self.since.keys() - indexed:
            idle = now - self.unused_since.pop(block)
            self.evictions[cause or ("idle" if idle > self.cache.config.cached_idle_s else "share")] += 1
            self.lifetimes.append(now - self.since.pop(block))
            self.idle.append(idle)
        for block in indexed:
            self.since.setdefault(block, now)
            if block.references:
                self.unused_since.pop(block, None)
            else:
                self.unused_since[block] = block.last_used  # a copy of its rows is a use too

    def compare(self, tables: Sequence[BlockTable]) -> None:
        stats = self.cache.stats()
        assert {name: getattr(stats, name) for name in self.totals} == dict(self.totals)
        assert stats.evictions == dict(self.evictions)
        assert {name: stats.arena_calls[name] for name in ("commit", "decommit")} == {
            name: self.calls[name] for name in ("commit", "decommit")
        }
        assert stats.lifetime_s == pytest.approx(histogram(self.lifetimes))
        assert stats.idle_before_eviction_s == pytest.approx(histogram(self.idle))
        ages = sorted(self.clock.now - since for since in self.unused_since.values())
        last = len(ages) - 1
        assert stats.idle_age_s == {n: ages[int(share * last)] for n, share in QUANTILES.items() if ages}
        self._compare_memory(stats, tables)

    def _compare_memory(self, stats: CacheStats, tables: Sequence[BlockTable]) -> None:
        stores = self.cache._residency.stores
        held: Counter[str] = Counter()
        number: Counter[str] = Counter()
        for g, store in enumerate(stores):
            filling = {t.groups[g].entries[-1, 0] for t in tables if t.groups[g].entries[-1, 2] < BLOCK}
            for block in store.live_blocks():
                state = "cached" if not block.references else "filling" if block.block_id in filling else "sealed"
                number[state] += 1
                for address, layout in {
                    block.extent: store.sealed_layout,
                    block.open_extent: store.open_layout,
                }.items():
                    held[state] += layout.extent_bytes if address else 0
        assert stats.num_blocks == number.total()
        assert (stats.num_cached_blocks, stats.num_filling_blocks) == (number["cached"], number["filling"])
        found = {"cached": stats.cached_bytes, "filling": stats.filling_bytes, "sealed": stats.sealed_bytes}
        assert found == {state: held[state] for state in found}
        assert stats.used_bytes == held.total() == sum(stats.form_bytes.values())
        assert stats.used_bytes + stats.free_bytes == stats.committed_bytes


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def histogram(ages: Sequence[float]) -> dict[str, float]:
    counts: dict[str, float] = {str(bound): sum(age <= bound for age in ages) for bound in AGE_BOUNDS_S}
    return counts | {"+Inf": len(ages), "sum": sum(ages)}


@pytest.mark.parametrize("kv", ["full", "int8"])
@pytest.mark.parametrize("groups", [(FULL_GROUP,), (FULL_GROUP, WINDOW_GROUP)], ids=["plain", "hybrid"])
@pytest.mark.parametrize("seed", [1, 2])
def test_counters_equal_a_naive_recount(kv: str, groups: tuple[Any, ...], seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    memory = (450_000 if kv == "full" else 220_000) * len(groups) * 3 // 4 + 110_000
    cache = make_cache(
        *groups, clock=clock, kv=kv, memory_bytes=memory, min_chunk_tokens=16, cached_share_ratio=0.4, cached_idle_s=50
    )
    recount = Recount(cache, clock)
    running: list[tuple[BlockTable, bytes]] = []
    for _ in range(150):
        clock.now += rng.choice([0.0, 0.5, 3.0, 60.0 if rng.random() < 0.2 else 1.0])
        choice = rng.random()
        if choice < 0.4 and len(running) < 3:
            salt, text = rng.choice([b"", b"", b"other"]), rng.choice(TEXTS)
            tokens = text[: rng.randrange(1, 150)] + [rng.randrange(11) for _ in range(rng.randrange(20))]
            if (begun := recount.begin(tokens, salt)) is not None:
                running.append((begun, salt))
        elif choice < 0.6 and running:
            table, salt = min(running, key=lambda one: one[0].num_tokens)
            recount.extend(table, [rng.randrange(11) for _ in range(rng.randrange(1, 24))], salt)
        elif choice < 0.85 and running:
            table, _ = running.pop(rng.randrange(len(running)))
            cache.release(table)
            recount.look("release")
        elif choice < 0.99:
            cache.maintain(1)
            recount.look()
        else:
            cache.clear()
            recount.look("clear")
        recount.compare([table for table, _ in running])
    cache.check_integrity()
    stats = cache.stats()
    assert len(stats.evictions) >= 3
    assert 0 < stats.hit_tokens < stats.findable_tokens < stats.lookup_tokens


def test_what_a_small_cache_misses_was_findable_and_what_never_came_was_not() -> None:
    def second_visit(memory_bytes: int) -> CacheStats:
        cache = make_cache(memory_bytes=memory_bytes, min_chunk_tokens=16, cached_share_ratio=1.0)
        for _ in range(2):
            for text in TEXTS:
                table = start(cache, text[:161])
                assert table is not None
                cache.release(table)
        return cache.stats()

    large, small = second_visit(10**7), second_visit(150_000)
    assert large.findable_tokens == small.findable_tokens == 4 * 160
    assert large.normalised_hit_ratio == 1.0
    assert large.hit_ratio == 0.5 - 0.5 / 161
    assert small.normalised_hit_ratio == small.hit_tokens / 640 < 0.5


def test_ratios_of_a_cache_that_did_nothing() -> None:
    stats = make_cache().stats()
    assert (stats.hit_ratio, stats.normalised_hit_ratio, stats.growth_per_1k_tokens) == (0.0, None, 0.0)
    assert stats.prefetch_accuracy is None
    assert stats.idle_age_s == {}


def test_idle_ages_are_looked_at_for_a_bounded_number_of_blocks() -> None:
    clock = Clock()
    cache = make_cache(clock=clock, memory_bytes=10**9, cached_share_ratio=1.0)
    table = start(cache, [i % 7 for i in range(3000 * BLOCK)])
    assert table is not None
    cache.release(table)
    clock.now = 10.0
    assert cache.stats().idle_age_s == {"0.5": 10.0, "0.9": 10.0, "1": 10.0}
    assert cache.stats().num_cached_blocks == 3000


def test_an_age_on_a_bound_counts_below_it() -> None:
    ages = AgeHistogram()
    for seconds in (0.0, 1.0, 1.5, 8000.0):
        ages.add(seconds)
    assert ages.cumulative() == {
        "1": 2, "10": 3, "60": 3, "300": 3, "1800": 3, "7200": 3, "+Inf": 4, "sum": 8002.5,
    }  # fmt: skip


# --- the snapshot that other threads read


def test_a_snapshot_is_frozen() -> None:
    stats = make_cache().stats()
    with pytest.raises(AttributeError):
        stats.hit_tokens = 3  # type: ignore[misc]
    for name, value in vars(stats).items():
        if isinstance(value, Mapping):
            with pytest.raises(TypeError):
                value["room"] = 3  # type: ignore[index]
            assert isinstance(getattr(stats, name), Mapping)


def test_maintain_publishes_and_nothing_else_does() -> None:
    cache = make_cache()
    first = cache.published
    table = start(cache, TEXTS[0])
    assert table is not None
    assert cache.published is first
    cache.maintain()
    assert cache.published.computed_tokens == 300
    assert cache.published == cache.stats()
    assert first.computed_tokens == 0


def test_snapshots_take_a_bounded_share_of_the_time() -> None:
    """On a clock by which a snapshot takes a second, the next one comes 500 seconds later; at rest it comes at once."""
    clock = Clock()
    cache = make_cache(clock=clock)
    table = start(cache, TEXTS[0])
    assert table is not None
    taken = []
    inner = cache.stats

    def slow() -> CacheStats:
        clock.now += 1
        taken.append(clock.now)
        return inner()

    cache.stats = slow  # type: ignore[method-assign]
    for _ in range(1200):
        clock.now += 1
        cache.maintain()
    assert len(taken) == 3
    cache.release(table)
    cache.maintain()
    assert len(taken) == 4
    assert cache.published.num_cached_blocks == 19


def test_another_thread_reads_the_published_snapshot_and_its_age() -> None:
    clock = Clock()
    cache = make_cache(clock=clock)
    cache.maintain()
    clock.now += 7
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.extend([cache.published, cache.published_age_s()]))
    reader.start()
    reader.join()
    assert seen == [cache.published, 7.0]


def test_a_snapshot_in_json_is_read_back_and_anything_else_is_refused() -> None:
    stats = make_cache().stats()
    assert CacheStats.from_json(stats.as_json()) == stats
    for spoilt, why in (
        ({"evictions": 3}, "one number as evictions"),
        ({"hit_tokens": {}}, "several numbers as hit_tokens"),
        ({"hit_tokens": True}, "no number"),
        ({"dragons": 1}, "dragons"),
    ):
        with pytest.raises(ConfigError, match=why):
            CacheStats.from_json(stats.as_json() | spoilt)
