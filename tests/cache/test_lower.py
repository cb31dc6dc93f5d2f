"""KVCache over tiers: what goes down and when, what comes up, and that nothing a tier does is ever seen by a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.cache import promotion
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, TierConfig
from ktransformer2.errors import ConfigError
from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits
from tests.cache.factories import (
    FULL_GROUP,
    WINDOW_GROUP,
    Clock,
    append,
    assert_rows,
    geometry,
    make_cache,
    start,
)
from tests.cache.tier_driving import cache_over, fetched, figures, lower_of, no_threads, read, seen_twice, write
from tests.tiers.memory_tier import MemoryTier

TEXT = [(i * i + 3) % 97 for i in range(200)]  # 12 full blocks of 16, and 8 tokens
FULL_BLOCKS = 12
BOTH = (FULL_GROUP, WINDOW_GROUP)


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    with no_threads():
        yield


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


def parents_first(tier: MemoryTier) -> bool:
    known: set[bytes] = set()
    for block in tier.blocks.values():
        if block.holds_parent and block.parent and block.parent not in known:
            return False
        known.add(block.key)
    return True


# --- down


def test_a_second_use_is_what_makes_a_block_worth_writing(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    table = start(cache, TEXT)
    assert table is not None
    write(cache)
    assert not tier.blocks
    other = start(cache, [*TEXT[:64], 5])
    assert other is not None
    write(cache)
    assert len(tier.blocks) == 4, "only what was found"
    assert parents_first(tier)
    assert tier.transfers == [("put", list(tier.blocks))], "one transfer"


def test_a_pin_is_written_too(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    table = start(cache, TEXT)
    assert table is not None
    pin = cache.advice.pin(TEXT[:64])
    assert pin is not None
    write(cache)
    assert (pin.num_tokens, len(tier.blocks)) == (64, 4)
    assert parents_first(tier)


@pytest.mark.parametrize("where", ["memory", "host"])
def test_what_can_be_loaded_again_leaves_before_what_must_be_computed(tier: MemoryTier, where: str) -> None:
    host = MemoryTier("host")
    if where == "host":
        tier.fails.add("put")  # what lies in host memory alone comes back as well
    cache = cache_over(host, tier)
    for text in (TEXT[:16], [9, *TEXT[:15]]):
        table = start(cache, text)
        assert table is not None
        cache.release(table)
    second = cache.match([9, *TEXT[:15], 5]).keys
    assert second, "the newer of the two"
    assert cache.advice.pin([9, *TEXT[:15]]) is not None
    write(cache)
    for pin in list(cache.advice._pins):
        cache.advice.unpin(pin)
    assert (len(host.blocks), len(tier.blocks)) == (1, where == "memory")
    if where == "memory":
        host.blocks.clear()
    cache.computed(16, 1.0)
    lower_of(cache)._promotion.speeds.loaded(10**9, 1.0, cache._clock())
    assert cache._residency.evict_one("room")
    assert cache.match([*TEXT[:16], 5]).keys, "the older one would have to be computed"
    assert not cache.match([9, *TEXT[:15], 5]).keys


def test_write_through_writes_what_is_full(tier: MemoryTier) -> None:
    cache = cache_over(tier, write_policy="write_through")
    table = start(cache, TEXT)
    assert table is not None
    write(cache)
    assert len(tier.blocks) == FULL_BLOCKS
    assert append(cache, table, [1] * 8)
    write(cache)
    assert len(tier.blocks) == FULL_BLOCKS + 1
    assert parents_first(tier)


@pytest.mark.parametrize("policy", ["write_through_selective", "write_through", "write_back"])
def test_an_orderly_end_keeps_everything_full(tier: MemoryTier, policy: str) -> None:
    cache = cache_over(tier, write_policy=policy)
    running, done = start(cache, TEXT), start(cache, [9, *TEXT[:40]])
    assert running is not None
    assert done is not None
    cache.release(done)
    cache.close()
    assert len(tier.blocks) == FULL_BLOCKS + 2
    assert parents_first(tier)
    assert tier.is_closed
    assert figures(cache).written_blocks == FULL_BLOCKS + 2


def test_write_back_writes_what_leaves_after_its_parents(tier: MemoryTier) -> None:
    cache = cache_over(tier, write_policy="write_back")
    seen_twice(cache, TEXT)
    write(cache)
    assert not tier.blocks
    cache._residency.evict_one("room")  # the partly filled tail
    cache._residency.evict_one("room")
    write(cache)
    assert len(tier.blocks) == FULL_BLOCKS
    assert parents_first(tier)
    cache.clear()
    table = fetched(cache, TEXT)
    assert_rows(cache, table, TEXT)
    assert table.restored_tokens == {"memory": 192}


def test_what_lies_below_is_not_written_again(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    for _ in range(3):
        seen_twice(cache, TEXT)
        write(cache)
    assert len(tier.transfers) == 1
    cache.close()
    assert len(tier.transfers) == 1


def test_copies_are_charged_bounded_and_given_back(tier: MemoryTier) -> None:
    extent = cache_over(tier).lineage.payload_bytes[0]
    cache = cache_over(tier, staging_bytes=3 * extent)
    seen_twice(cache, TEXT)
    cache.maintain()
    assert cache.staged_bytes == 3 * extent
    assert cache.stats().staged_bytes == 3 * extent
    assert cache.stats().table_bytes >= 3 * extent
    write(cache)
    assert cache.staged_bytes == 0
    assert len(tier.blocks) == FULL_BLOCKS, "what found no room in the buffer waited"


def test_a_full_limit_leaves_no_room_for_copies_and_hurts_nobody(tier: MemoryTier) -> None:
    cache = cache_over(tier, memory_bytes=10**6, cached_share_ratio=1.0)
    seen_twice(cache, TEXT[:48])
    while cache._arena.charge(4096):
        pass
    cache.maintain()
    assert figures(cache).skipped_blocks["room"] > 0
    assert cache.staged_bytes == 0
    assert cache.match(TEXT[:48]).num_tokens == 47, "nobody was evicted for a copy"


@pytest.mark.parametrize("how", ["fails", "raises"])
def test_what_no_tier_took_is_offered_again(tier: MemoryTier, how: str) -> None:
    cache = cache_over(tier)
    getattr(tier, how).add("put")
    seen_twice(cache, TEXT)
    write(cache)
    assert figures(cache).failed_blocks == FULL_BLOCKS
    getattr(tier, how).clear()
    seen_twice(cache, TEXT)
    write(cache)
    assert len(tier.blocks) == FULL_BLOCKS


def test_a_parent_that_a_tier_lost_is_written_again(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    seen_twice(cache, TEXT[:65])
    write(cache)
    tier.forget(next(iter(tier.blocks)))  # the root, and so all of it
    assert not tier.blocks
    seen_twice(cache, TEXT)
    write(cache)
    assert len(tier.blocks) == FULL_BLOCKS
    assert parents_first(tier)


def test_what_host_memory_alone_has_is_not_kept(tier: MemoryTier) -> None:
    """The disk refused what the host took: the orderly end offers it again, also what came up from there."""
    host = MemoryTier("host")
    cache = cache_over(host, tier)
    tier.fails.add("put")
    seen_twice(cache, TEXT)
    write(cache)
    assert (len(host.blocks), len(tier.blocks)) == (FULL_BLOCKS, 0)
    assert (figures(cache).written_blocks, figures(cache).failed_blocks) == (0, FULL_BLOCKS)
    cache.clear()
    cache.release(fetched(cache, TEXT))
    assert figures(cache).restored_tokens == {"host": FULL_BLOCKS * 16}
    tier.fails.clear()
    cache.close()
    assert len(tier.blocks) == FULL_BLOCKS
    assert parents_first(tier)


def test_where_only_host_memory_is_it_counts(tier: MemoryTier) -> None:
    host = MemoryTier("host")
    cache = cache_over(host)
    seen_twice(cache, TEXT)
    write(cache)
    assert figures(cache).written_blocks == FULL_BLOCKS
    cache.close()
    assert len(host.transfers) == 1, "nothing is offered twice"


def test_the_end_does_not_try_for_ever_where_nothing_is_taken(tier: MemoryTier) -> None:
    cache = cache_over(tier, staging_bytes=1)  # one block at a time
    table = start(cache, TEXT)
    assert table is not None
    tier.fails.add("put")
    cache.close()
    assert len(tier.transfers) <= 4
    assert tier.is_closed


def test_no_time_to_flush_writes_nothing_and_says_so(tier: MemoryTier, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_over(tier, flush_s=0.0)
    assert start(cache, TEXT) is not None
    cache.close()
    assert not tier.blocks
    assert figures(cache).skipped_blocks == {"time": FULL_BLOCKS}
    assert caplog.messages == ["12 full blocks are not kept for the next time: 12 for want of time"]


def test_what_no_tier_takes_at_the_end_is_counted(tier: MemoryTier, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_over(tier, staging_bytes=1)  # one block at a time
    assert start(cache, TEXT) is not None
    tier.fails.add("put")
    cache.close()
    stats = figures(cache)
    assert stats.failed_blocks + stats.skipped_blocks["tier"] >= FULL_BLOCKS
    assert "for want of a tier that takes them" in caplog.text


def test_the_end_writes_what_fits_on_the_disk_and_writes_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 4 * 2**20
    lineage = make_cache().lineage
    disk = DiskTier(tmp_path, DiskLimits(limit), lineage)
    cache = cache_over(disk, cached_share_ratio=1.0)
    texts = [[text, *TEXT[:80]] for text in range(40)]  # five blocks each, more than fit
    for text in texts:
        table = start(cache, text)
        assert table is not None
        cache.release(table)
        cache._clock.now += 1.0  # type: ignore[attr-defined]  # the tests' clock
    cache.close()
    stats, below = figures(cache), disk.stats()
    assert below.evicted_blocks == 0
    assert below.stored_blocks == stats.written_blocks > 100
    assert stats.skipped_blocks == {"limit": 200 - stats.written_blocks}
    assert len(caplog.messages) == 1
    assert f"{200 - stats.written_blocks} for want of room in a tier" in caplog.text
    again = cache_over(DiskTier(tmp_path, DiskLimits(limit), lineage))
    found = [fetched(again, text).cached_tokens for text in texts]
    assert set(found[:-1]) <= {0, 80} | {tokens for tokens in found if found.count(tokens) == 1}, "texts are whole"
    assert found == sorted(found), "the last used are there"
    assert found[-20:] == [80] * 20


def test_at_the_end_a_small_tier_gets_what_it_keeps_and_a_large_one_the_rest_too() -> None:
    small, large = MemoryTier("small"), MemoryTier("large")
    cache = cache_over(small, large)
    old, new = start(cache, TEXT[:64]), start(cache, [9, *TEXT[:63]])
    assert old is not None
    assert new is not None
    cache.release(old)
    cache.release(new)
    small.limit_bytes = 6 * (cache.lineage.payload_bytes[0] + 24 * 2**10)  # and a share of it for what is not records
    cache.close()
    assert (len(small.blocks), len(large.blocks)) == (5, 8)
    assert parents_first(small)
    assert parents_first(large)


def test_what_only_a_tier_has_that_ends_too_is_written_at_the_end(tier: MemoryTier) -> None:
    host = MemoryTier("host")
    host.lasts = False
    cache = cache_over(host, tier)
    tier.fails.add("put")
    seen_twice(cache, TEXT)
    write(cache)
    tier.fails.clear()
    assert (len(host.blocks), len(tier.blocks)) == (FULL_BLOCKS, 0)
    cache.close()
    assert len(tier.blocks) == FULL_BLOCKS


def test_at_the_end_nothing_is_written_to_what_ends_too(tier: MemoryTier, caplog: pytest.LogCaptureFixture) -> None:
    tier.lasts = False
    cache = cache_over(tier)
    assert start(cache, TEXT) is not None
    cache.close()
    assert not tier.blocks
    assert caplog.messages == []


def test_memory_of_others_is_not_written(tier: MemoryTier) -> None:
    """What lies behind the rows of an extent was another prompt's once."""
    cache = cache_over(tier)
    store = cache._residency.stores[0]
    seen_twice(cache, TEXT[:33])
    write(cache)
    for block in tier.blocks.values():
        assert not any(bytes(block.payload)[store._row_bytes :])


# --- up


@pytest.mark.parametrize("kv", ["full", "int8"])
@pytest.mark.parametrize("groups", [(FULL_GROUP,), BOTH, (WINDOW_GROUP,)], ids=["plain", "hybrid", "windowed"])
def test_a_second_cache_finds_what_the_first_one_read(tier: MemoryTier, kv: str, groups: tuple[Any, ...]) -> None:
    first = cache_over(tier, groups=groups, kv=kv)
    assert start(first, TEXT) is not None
    first.close()
    second = cache_over(tier, groups=groups, kv=kv)
    table = fetched(second, TEXT)
    restored = {"memory": 48 if groups == (WINDOW_GROUP,) else 192}  # of a window only what it sees
    assert table.restored_tokens == restored
    assert table.cached_tokens == 192
    assert_rows(second, table, TEXT)
    stats = second.stats()
    assert stats.prefetched_blocks == stats.prefetch_used_blocks
    assert stats.prefetch_accuracy == 1.0
    assert stats.restored_tokens == restored
    assert append(second, table, [7] * 30)
    assert_rows(second, table, [*TEXT, *[7] * 30])


def test_only_what_a_window_sees_is_brought_up(tier: MemoryTier) -> None:
    first = cache_over(tier, groups=BOTH, write_policy="write_through")
    seen_twice(first, TEXT)
    first.close()
    second = cache_over(tier, groups=BOTH)
    fetched(second, TEXT)
    windowed = [block for block in second._residency.indexes[1] if block.key is not None]
    assert len(windowed) <= 4, "40 tokens of 16 a block, and what was computed"
    assert figures(second).loaded_blocks == FULL_BLOCKS + 3


def test_only_what_the_device_lacks_is_read(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    seen_twice(cache, TEXT)
    write(cache)
    assert cache.fetch(TEXT) is None
    for _ in range(5):  # the tail and four blocks
        cache._residency.evict_one("room")
    table = fetched(cache, TEXT)
    assert table.restored_tokens == {"memory": 64}
    assert table.cached_tokens == 192
    assert figures(cache).loaded_blocks == 4
    assert_rows(cache, table, TEXT)
    cache.release(table)
    again = start(cache, TEXT)
    assert again is not None
    assert again.restored_tokens == {}, "restored once; now the device has it"


def test_other_salts_other_models_and_other_plans_find_nothing(tier: MemoryTier) -> None:
    first = cache_over(tier)
    seen_twice(first, TEXT, b"mine")
    write(first)
    assert tier.blocks
    assert first.fetch(TEXT, b"yours") is None
    assert cache_over(tier, kv="int8").fetch(TEXT, b"mine") is None
    assert cache_over(tier, block_tokens=32).fetch(TEXT, b"mine") is None
    assert cache_over(tier).fetch(TEXT, b"mine") is not None


def test_lineages_differ_in_what_decides_bytes() -> None:
    lineages = [
        make_cache().lineage,
        make_cache(kv="int8").lineage,
        make_cache(block_tokens=32).lineage,
        make_cache(WINDOW_GROUP).lineage,
        KVCache(geometry(), CacheConfig(kv="full", block_tokens=16), b"another").lineage,
    ]
    assert len({(each.fingerprint, each.layouts) for each in lineages}) == len(lineages)
    assert make_cache().lineage == make_cache().lineage


def test_two_prompts_that_wait_for_the_same_read_it_once(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    seen_twice(cache, TEXT)
    write(cache)
    cache.clear()
    tier.transfers.clear()
    first, second = cache.fetch(TEXT), cache.fetch([*TEXT[:100], 5, 6])
    assert first is not None
    assert second is not None
    assert cache.is_loading(second)
    cache.end_fetch(first)  # cancelled; what the other one needs still comes
    read(cache)
    assert not cache.is_loading(second)
    assert len(tier.transfers) == 1
    assert cache.match([*TEXT[:100], 5, 6]).num_tokens == 100
    cache.end_fetch(second)
    cache.check_integrity()


def test_what_comes_when_nobody_waits_is_late(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    seen_twice(cache, TEXT)
    write(cache)
    cache.clear()
    fetch = cache.fetch(TEXT)
    assert fetch is not None
    assert lower_of(cache)._prefetcher.read_one()
    cache.end_fetch(fetch)
    read(cache)
    stats = cache.stats()
    assert (stats.prefetched_blocks, stats.prefetch_late_blocks, stats.num_blocks) == (FULL_BLOCKS, FULL_BLOCKS, 0)
    assert cache.staged_bytes == 0
    assert cache.fetch(TEXT) is not None, "it can be asked for again"


def test_what_was_computed_meanwhile_is_late_too(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    seen_twice(cache, TEXT)
    write(cache)
    cache.clear()
    assert cache.fetch(TEXT) is not None
    assert start(cache, TEXT) is not None
    read(cache)
    assert cache.stats().prefetch_late_blocks == FULL_BLOCKS


def test_what_is_evicted_before_its_prompt_comes_is_unused(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    seen_twice(cache, TEXT)
    write(cache)
    cache.clear()
    fetch = cache.fetch(TEXT)
    assert fetch is not None
    read(cache)
    cache.clear()
    assert cache.stats().prefetch_unused_blocks == FULL_BLOCKS
    assert cache.stats().prefetch_accuracy == 0.0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_prefetch_takes_no_room_of_a_prompt_before_it(tier: MemoryTier, order: tuple[int, ...]) -> None:
    """Room for two of three texts, which are asked for in any order: those whose turn is first have all of theirs."""
    texts = [[text, *TEXT[:96]] for text in range(3)]
    big = cache_over(tier)
    for text in texts:
        seen_twice(big, text)
    write(big)
    extent = big.lineage.payload_bytes[0]
    small = cache_over(tier, memory_bytes=16 * extent, cached_share_ratio=1.0, min_chunk_tokens=16, staging_bytes=1)
    fetches = []
    for turn in order:
        fetches.append(small.fetch(texts[turn], turn=(turn,)))
        read(small)
    assert None not in fetches
    found = [small.match(text).num_tokens for text in texts]
    assert found[:2] == [96, 96]
    assert found[2] < 96
    assert small.stats().peak_bytes <= 16 * extent
    for fetch in fetches:
        assert fetch is not None
        small.end_fetch(fetch)
    small.check_integrity()


def test_more_than_would_stay_is_not_brought_up(tier: MemoryTier) -> None:
    big = cache_over(tier)
    seen_twice(big, TEXT)
    write(big)
    extent = big.lineage.payload_bytes[0]
    small = cache_over(tier, memory_bytes=12 * extent, min_chunk_tokens=16)  # half of it may be cached: six blocks
    table = fetched(small, TEXT[:100])
    assert table.restored_tokens == {"memory": 96}
    small.release(table)
    small.clear()
    assert small.fetch(TEXT) is not None
    read(small)
    assert small.match(TEXT).num_tokens == 96


# --- load or recompute, patience


def test_a_load_slower_than_computing_is_not_taken_and_counted(tier: MemoryTier) -> None:
    clock = Clock()
    cache = cache_over(tier, clock=clock)
    seen_twice(cache, TEXT)
    write(cache)
    cache.clear()
    speeds = lower_of(cache)._promotion.speeds
    cache.computed(1000, 0.001)
    speeds.loaded(1000, 1.0, clock())  # a slow disk
    assert cache.fetch(TEXT) is None
    assert cache.stats().not_worth_tokens == 192
    clock.now += 100.0  # was it slow only then?
    assert cache.fetch(TEXT) is not None


def test_patience_ends(tier: MemoryTier) -> None:
    clock = Clock()
    cache = cache_over(tier, clock=clock)
    seen_twice(cache, TEXT)
    write(cache)
    cache.clear()
    cache.computed(192, 2.0)  # computing all of it takes two seconds
    fetch = cache.fetch(TEXT)
    assert fetch is not None
    clock.now += 100.0  # in the queue: that costs nothing
    assert cache.is_loading(fetch)
    clock.now += 1.9
    assert cache.is_loading(fetch)
    clock.now += 0.2
    assert not cache.is_loading(fetch)
    cache.end_fetch(fetch)
    assert figures(cache).held_s == pytest.approx(2.1)


# --- faults


@pytest.mark.parametrize("fault", ["fails", "raises", "short", "says_yes", "forgets"])
def test_no_fault_of_a_tier_is_seen_by_a_prompt(tier: MemoryTier, fault: str) -> None:
    first = cache_over(tier)
    seen_twice(first, TEXT)
    write(first)
    if fault in ("fails", "raises"):
        getattr(tier, fault).add("get")
    elif fault == "short":
        tier.most = 5
    elif fault == "says_yes":
        tier.says_yes = True
    second = cache_over(tier)
    fetch = second.fetch(TEXT)
    if fault == "forgets":
        tier.clear()
    read(second)
    assert fetch is not None
    assert not second.is_loading(fetch)
    second.end_fetch(fetch)
    table = start(second, TEXT)
    assert table is not None
    assert_rows(second, table, TEXT)
    assert second.staged_bytes == 0


def test_tiers_join_once_and_need_a_fingerprint(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    with pytest.raises(ConfigError, match="joined this cache already"):
        cache.join([tier], TierConfig())
    nameless = KVCache(geometry(), CacheConfig())
    with pytest.raises(ConfigError, match="without a fingerprint"):
        nameless.join([tier], TierConfig())


def test_explain_names_the_tier(tier: MemoryTier) -> None:
    cache = cache_over(tier)
    seen_twice(cache, TEXT)
    write(cache)
    assert cache.explain(TEXT).tier == ""
    cache.clear()
    found = cache.explain(TEXT)
    assert (found.reason, found.tier) == ("evicted", "memory")
    assert str(found).endswith("; the memory tier has what follows")
    assert cache.explain([5, *TEXT]).tier == ""
    assert cache_over(tier).explain(TEXT).tier == "memory"


def test_without_tiers_nothing_is_asked() -> None:
    cache = make_cache()
    assert cache.fetch(TEXT) is None
    cache.receive()
    cache.computed(10, 1.0)
    assert (cache.staged_bytes, cache.tier_stats()) == (0, None)
    assert promotion.MOST_PATIENCE_S > promotion.LEAST_PATIENCE_S
