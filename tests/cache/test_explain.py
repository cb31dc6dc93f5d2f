"""Why a prompt was not found: every reason, driven by a cache that has it."""

from __future__ import annotations

from typing import Any

import pytest

from ktransformer2.cache.explain import Explanation
from ktransformer2.cache.ghosts import Eviction, Ghosts
from ktransformer2.cache.kv_cache import KVCache
from tests.cache.factories import FULL_GROUP, WINDOW_GROUP, Clock, make_cache, start

TEXT = [(i * i + i // 7) % 31 for i in range(200)]


def read(cache: KVCache, tokens: list[int], salt: bytes = b"") -> None:
    table = start(cache, tokens, salt)
    assert table is not None
    cache.release(table)


def cache_with(*texts: list[int], **config: Any) -> KVCache:
    cache = make_cache(**{"kv": "int8"} | config)
    for text in texts:
        read(cache, text)
    return cache


def test_all_of_it_was_there() -> None:
    assert cache_with(TEXT).explain(TEXT[:161]) == Explanation(161, 160, "found", 160)
    assert cache_with(TEXT, kv="full").explain(TEXT) == Explanation(200, 199, "found", 199)


@pytest.mark.parametrize(("kv", "hit"), [("int8", 64), ("full", 70)])
def test_the_first_token_that_differs(kv: str, hit: int) -> None:
    other = [*TEXT[:70], 99, *TEXT[71:]]
    assert cache_with(TEXT, kv=kv).explain(other) == Explanation(200, hit, "differs", 70)


def test_the_first_token_of_all_differs() -> None:
    assert cache_with(TEXT).explain([99, *TEXT]) == Explanation(201, 0, "differs", 0)


def test_the_first_token_of_a_block_differs() -> None:
    assert cache_with(TEXT).explain([*TEXT[:64], 99, *TEXT[65:]]) == Explanation(200, 64, "differs", 64)


def test_nothing_goes_on_from_there() -> None:
    assert make_cache().explain(TEXT) == Explanation(200, 0, "new", 0)
    assert cache_with(TEXT[:64]).explain(TEXT) == Explanation(200, 64, "new", 64)
    assert cache_with(TEXT[:70], kv="full").explain(TEXT) == Explanation(200, 70, "new", 70)


def test_less_than_a_block() -> None:
    cache = cache_with(TEXT)
    assert cache.explain([99] * 16) == Explanation(16, 0, "too short", 0)
    assert cache.explain([*TEXT[:64], 99, 98]) == Explanation(66, 64, "too short", 64)
    assert cache_with(TEXT, kv="full").explain([99] * 16).reason == "differs"  # there parts of a block are found


def test_rows_that_are_there_in_another_form() -> None:
    assert cache_with(TEXT).explain(TEXT[:75]) == Explanation(75, 64, "form", 64)
    assert cache_with(TEXT, kv="full").explain(TEXT[:75]) == Explanation(75, 74, "found", 74)


@pytest.mark.parametrize("kv", ["int8", "full"])
def test_evicted_when_and_why(kv: str) -> None:
    clock = Clock()
    cache = cache_with(TEXT, clock=clock, kv=kv, cached_idle_s=50)
    clock.now = 60
    cache.maintain()
    clock.now = 100
    assert cache.explain(TEXT) == Explanation(200, 0, "evicted", 0, "idle", 40)
    read(cache, TEXT[:64])
    assert cache.explain(TEXT) == Explanation(200, 64, "evicted", 64, "idle", 40)
    read(cache, TEXT)
    assert cache.explain(TEXT[:161]).reason == "found"  # what came back is not missed
    cache.clear()
    assert cache.explain(TEXT) == Explanation(200, 0, "evicted", 0, "clear", 0)


def test_evicted_from_a_window_only() -> None:
    """The window lets go its blocks while it passes, so they are older than those of the layers that see all."""
    clock = Clock()
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv="int8", clock=clock, cached_idle_s=50)
    table = start(cache, TEXT[:192])
    assert table is not None
    clock.now = 60
    cache.maintain()  # the blocks that the window has passed
    assert cache.explain(TEXT[:65]) == Explanation(65, 0, "evicted", 0, "idle", 0)
    assert cache.explain(TEXT[:193]).reason == "found"


def test_another_salt_is_named_to_whoever_runs_the_cache_only() -> None:
    cache = make_cache(kv="int8")
    read(cache, TEXT, b"a tenant")
    assert cache.explain(TEXT, b"another") == Explanation(200, 0, "other salt", 0)
    assert cache.explain(TEXT, b"another", across_salts=False) == Explanation(200, 0, "new", 0)
    assert cache.explain(TEXT[:161], b"a tenant").reason == "found"
    read(cache, TEXT[:64], b"another")
    assert cache.explain(TEXT, b"another") == Explanation(200, 64, "other salt", 64)


def test_another_salt_at_model_precision_counts_parts_of_a_block() -> None:
    cache = make_cache(kv="full")
    read(cache, TEXT[:10], b"a tenant")
    assert cache.explain(TEXT[:12], b"another") == Explanation(12, 0, "other salt", 0)


def test_as_many_salts_are_remembered_as_are_promised() -> None:
    cache = make_cache(kv="int8")
    read(cache, TEXT, b"first")
    for number in range(62):
        cache.new_table(b"%d" % number)
    cache.new_table(b"another")
    assert cache.explain(TEXT, b"another").reason == "other salt"
    cache.new_table(b"one more")
    assert cache.explain(TEXT, b"another").reason == "new"


def test_the_match_of_a_while_ago_is_explained_as_it_was() -> None:
    cache = make_cache(kv="int8")
    before = cache.match(TEXT)
    read(cache, TEXT)
    assert cache.explain(TEXT, match=before).hit_tokens == 0
    assert cache.explain(TEXT).hit_tokens == 192


def test_asking_changes_nothing() -> None:
    cache = cache_with(TEXT)
    before = cache.stats()
    cache.explain(TEXT)
    cache.explain([99, *TEXT], b"another")
    assert cache.stats() == before


def test_each_reason_is_one_sentence_without_a_token() -> None:
    cases = {
        Explanation(200, 199, "found", 199): "199 of 200 tokens found; only the last one is computed, as always",
        Explanation(2000, 1024, "differs", 1030): "1,024 of 2,000 tokens found; token 1,030 is the first that differs "
        "from what the cache holds",
        Explanation(9, 0, "new", 0): "0 of 9 tokens found; nothing that the cache holds goes on with token 0",
        Explanation(
            75, 64, "too short", 64
        ): "64 of 75 tokens found; what is left from token 64 on is less than a block",
        Explanation(75, 64, "form", 64): "64 of 75 tokens found; what is left from token 64 on lies inside a quantised "
        "block, which is taken whole or not at all",
        Explanation(200, 0, "evicted", 0, "share", 41.5): "0 of 200 tokens found; the block from token 0 on left 42 s "
        "ago, for share",
        Explanation(
            200, 0, "other salt", 0
        ): "0 of 200 tokens found; what comes from token 0 on is known under another salt only",
    }
    assert {str(explanation): text for explanation, text in cases.items()} == {text: text for text in cases.values()}


def test_ghosts_keep_the_newest_half_at_least_and_never_more_than_their_capacity() -> None:
    ghosts = Ghosts(10)
    for number in range(100):
        ghosts.add(b"%d" % number, Eviction(float(number), "room"))
        assert len(ghosts) <= 10
        for kept in range(max(0, number - 4), number + 1):
            assert ghosts.get(b"%d" % kept) == Eviction(float(kept), "room")
    assert ghosts.get(b"80") is None


def test_ghosts_tell_of_the_newest_time_a_key_left() -> None:
    ghosts = Ghosts(4)
    ghosts.add(b"key", Eviction(1.0, "room"))
    ghosts.add(b"other", Eviction(2.0, "room"))
    ghosts.add(b"key", Eviction(3.0, "idle"))
    assert ghosts.get(b"key") == Eviction(3.0, "idle")
