"""What callers say of a text, inside the cache: pins bind up to their cap, all else decides who goes first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.replacement import POLICIES
from ktransformer2.errors import ConfigError, EngineClosedError, OwnershipError
from ktransformer2.layout import LayerGroup
from tests.cache.factories import FULL_GROUP, WINDOW_GROUP, Clock, append, make_cache, start

BLOCK = 16
MEMORY = 2**20  # some 150 blocks of FULL_GROUP


def text(number: int, blocks: int, start: Sequence[int] = ()) -> list[int]:
    """`blocks` whole blocks that begin with `start`; texts of different numbers share nothing else."""
    return [*start, *(1000 * number + i for i in range(BLOCK * blocks - len(start)))]


def read(cache: KVCache, tokens: Sequence[int], salt: bytes = b"") -> None:
    table = start(cache, tokens, salt)
    assert table is not None, "no room"
    cache.release(table)


def held(cache: KVCache, tokens: Sequence[int], salt: bytes = b"") -> int:
    """How many leading blocks of `tokens` are found."""
    return cache.match([*tokens, -1], salt).num_tokens // BLOCK


def flood(cache: KVCache, first: int = 100, texts: int = 40) -> None:
    """Read more than the cache holds, once each."""
    for number in range(first, first + texts):
        read(cache, text(number, 8))


# --- pins


@pytest.mark.parametrize("groups", [(FULL_GROUP,), (FULL_GROUP, WINDOW_GROUP)], ids=["full", "window"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_text_survives_anything(policy: str, groups: tuple[LayerGroup, ...]) -> None:
    cache = make_cache(*groups, memory_bytes=MEMORY, replacement=policy)
    kept, other = text(1, 5), text(2, 5)
    read(cache, kept)
    read(cache, other)
    pin = cache.advice.pin([*kept, 7])
    assert pin is not None
    assert pin.num_tokens == 5 * BLOCK
    flood(cache)
    cache.check_integrity()
    assert held(cache, kept) == 5
    assert held(cache, other) == 0
    cache.clear()
    assert held(cache, kept) == 5
    cache.advice.unpin(pin)
    cache.check_integrity()
    cache.clear()
    assert (held(cache, kept), cache.stats().num_blocks) == (0, 0)
    cache.close()


def test_the_cap_holds() -> None:
    cache = make_cache(memory_bytes=MEMORY, pinned_share_ratio=0.25)
    pins = []
    for number in range(20):
        read(cache, text(number, 4))
        before = cache.stats().pinned_bytes
        pin = cache.advice.pin(text(number, 4))
        if pin is None:
            assert cache.stats().pinned_bytes == before
            break
        pins.append(pin)
    extent = cache._residency.stores[0].sealed_layout.extent_bytes
    assert len(pins) == MEMORY // 4 // (4 * extent)
    stats = cache.stats()
    assert stats.num_pinned_blocks == 4 * len(pins)
    assert stats.pinned_bytes == stats.num_pinned_blocks * extent <= MEMORY // 4
    flood(cache)
    assert [held(cache, text(number, 4)) for number in range(len(pins))] == [4] * len(pins)
    for pin in pins:
        cache.advice.unpin(pin)
    assert (cache.stats().pinned_bytes, cache.stats().num_pinned_blocks) == (0, 0)
    cache.check_integrity()


def test_without_a_share_nothing_is_pinned() -> None:
    cache = make_cache(pinned_share_ratio=0.0)
    read(cache, text(1, 1))
    assert cache.advice.pin(text(1, 1)) is None


def test_a_text_pinned_twice_counts_once_and_stays_until_the_second_unpin() -> None:
    cache = make_cache(memory_bytes=MEMORY)
    kept = text(1, 4)
    read(cache, kept)
    first, second = cache.advice.pin(kept), cache.advice.pin(kept)
    assert first is not None
    assert second is not None
    assert cache.stats().num_pinned_blocks == 4
    cache.advice.unpin(first)
    cache.advice.unpin(first)  # does nothing
    flood(cache)
    assert held(cache, kept) == 4
    cache.advice.unpin(second)
    flood(cache)
    assert held(cache, kept) == 0
    cache.check_integrity()


def test_only_what_is_cached_is_pinned() -> None:
    cache = make_cache()
    kept = text(1, 4)
    nothing = cache.advice.pin(kept)
    assert nothing is not None
    assert nothing.num_tokens == 0
    read(cache, kept[: 2 * BLOCK])
    part = cache.advice.pin(kept)
    assert part is not None
    assert part.num_tokens == 2 * BLOCK
    assert cache.stats().num_pinned_blocks == 2
    other = cache.advice.pin(kept, b"other salt")
    assert other is not None
    assert other.num_tokens == 0


def test_a_pinned_block_in_use_keeps_no_rows_as_computed() -> None:
    """They are kept for a rollback while a sequence may ask for one, and go with it."""
    cache = make_cache(kv="int8", max_rollback_tokens=64)
    table = start(cache, text(1, 4))
    assert table is not None
    pin = cache.advice.pin(text(1, 4))
    assert pin is not None
    both = cache.stats().used_bytes
    cache.release(table)
    cache.check_integrity()
    stats = cache.stats()
    assert stats.used_bytes == stats.pinned_bytes < both
    assert stats.cached_bytes == 0
    cache.advice.unpin(pin)
    assert cache.stats().cached_bytes == stats.pinned_bytes
    cache.check_integrity()


def test_who_continues_a_pinned_text_copies_nothing_of_it() -> None:
    cache = make_cache(memory_bytes=MEMORY)
    read(cache, text(1, 4))
    assert cache.advice.pin(text(1, 4)) is not None
    table = start(cache, text(9, 6, start=text(1, 4)))
    assert table is not None
    assert table.cached_tokens == 4 * BLOCK
    assert cache.rollback(table, 2 * BLOCK)
    assert append(cache, table, [5] * BLOCK)
    cache.release(table)
    assert cache.stats().num_pinned_blocks == 4
    cache.check_integrity()


# --- advice


def test_low_priority_goes_first_and_high_last() -> None:
    cache = make_cache(memory_bytes=MEMORY)
    high, plain, low = text(1, 4), text(2, 4), text(3, 4)
    for tokens in (high, plain, low):
        read(cache, tokens)
    assert cache.advice.prioritise(high, 5) == 4
    assert cache.advice.prioritise(low, -5) == 4
    number = 100
    while held(cache, low):
        read(cache, text(number, 1))
        number += 1
    assert (held(cache, high), held(cache, plain)) == (4, 4)
    flood(cache)
    assert (held(cache, high), held(cache, plain)) == (4, 0)
    assert cache.advice.prioritise(high, 0) == 4
    flood(cache)
    assert held(cache, high) == 0
    with pytest.raises(ConfigError, match="priority 101"):
        cache.advice.prioritise(high, 101)


def test_what_has_ended_goes_first_and_what_it_shares_stays() -> None:
    cache = make_cache(memory_bytes=MEMORY, replacement="lru")
    system = text(1, 3)
    mine, other = text(2, 6, start=system), text(3, 6, start=system)
    read(cache, other)
    read(cache, [*mine, 1, 2, 3])  # and a tail that fills no block
    assert cache.advice.ended([*mine, 1, 2, 3]) == 4
    number = 100
    while held(cache, mine) > 3:
        assert held(cache, other) == 6
        read(cache, text(number, 1))
        number += 1
    assert (held(cache, mine), held(cache, other)) == (3, 6)


def test_an_answer_that_was_written_anew_supersedes_the_first_one() -> None:
    cache = make_cache(memory_bytes=MEMORY, replacement="lru")
    question = text(1, 3)
    first, second = text(2, 5, start=question), text(3, 5, start=question)
    read(cache, first)
    read(cache, second)
    read(cache, first)  # the older one was used last
    assert cache.advice.superseded(first, len(question)) == 2
    number = 100
    while held(cache, first) > 3:
        assert held(cache, second) == 5
        read(cache, text(number, 1))
        number += 1
    assert cache.advice.ended(second) == 5  # nothing that matters shares it any more


def test_who_waits_outlives_those_who_came_later_and_no_longer() -> None:
    clock = Clock()
    cache = make_cache(memory_bytes=MEMORY, clock=clock)
    waiting = text(1, 4)
    read(cache, waiting)
    assert cache.advice.waiting(waiting, 1000.0) == 4
    clock.now = 900.0  # beyond `cached_idle_s`
    cache.maintain()
    flood(cache)
    assert held(cache, waiting) == 4
    clock.now = 1001.0
    cache.maintain()
    assert held(cache, waiting) == 0
    with pytest.raises(ConfigError, match="above 0"):
        cache.advice.waiting(waiting, 0.0)


def test_a_time_to_live_of_its_own_is_renewed_by_each_use() -> None:
    clock = Clock()
    cache = make_cache(clock=clock)
    short, plain = text(1, 2), text(2, 2)
    read(cache, short)
    read(cache, plain)
    assert cache.advice.live(short, 10.0) == 2
    clock.now = 9.0
    read(cache, short)
    clock.now = 18.0
    cache.maintain()
    assert held(cache, short) == 2
    clock.now = 20.0
    cache.maintain()
    assert (held(cache, short), held(cache, plain)) == (0, 2)
    with pytest.raises(ConfigError, match="above 0"):
        cache.advice.live(plain, float("nan"))


def test_advice_is_under_one_salt() -> None:
    cache = make_cache()
    read(cache, text(1, 2), b"a")
    assert [cache.advice.ended(text(1, 2), salt) for salt in (b"a", b"b")] == [2, 0]


def test_only_the_owner_says_anything() -> None:
    cache = make_cache()
    read(cache, text(1, 1))
    said: list[str] = []

    def from_elsewhere() -> None:
        with pytest.raises(OwnershipError):
            cache.advice.ended(text(1, 1))
        with pytest.raises(OwnershipError):
            cache.advice.pin(text(1, 1))
        said.append("both")

    thread = threading.Thread(target=from_elsewhere)
    thread.start()
    thread.join()
    assert said == ["both"]
    cache.close()
    with pytest.raises(EngineClosedError):
        cache.advice.pin(text(1, 1))
