"""A cache with tiers, driven without threads: what waits is written and read when a test says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.lower import LowerStats, LowerTiers
from ktransformer2.config import TierConfig
from ktransformer2.tiers.prefetcher import Prefetcher
from ktransformer2.tiers.tier import Tier
from ktransformer2.tiers.write_combiner import WriteCombiner
from tests.cache.factories import make_cache, start


@contextmanager
def no_threads() -> Iterator[None]:
    """Inside, nothing is written or read but by `write` and `read`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteCombiner, "_start", lambda _: None)
        patch.setattr(Prefetcher, "_start", lambda _: None)
        yield


def cache_over(*tiers: Tier, groups: Sequence[Any] = (), clock: Any = None, **config: Any) -> KVCache:
    """`config`: fields of TierConfig and CacheConfig."""
    of_tiers = {name: config.pop(name) for name in list(config) if hasattr(TierConfig(), name)}
    cache = make_cache(*groups, clock=clock, **config)
    cache.join(tiers, TierConfig(**of_tiers))
    return cache


def lower_of(cache: KVCache) -> LowerTiers:
    assert cache._lower is not None
    return cache._lower


def figures(cache: KVCache) -> LowerStats:
    stats = cache.tier_stats()
    assert stats is not None
    return stats


def write(cache: KVCache) -> None:
    """Everything that is wanted below is copied and written."""
    lower = lower_of(cache)
    cache.maintain()
    while lower._combiner.write_batch():
        cache.maintain()
    cache.check_integrity()


def read(cache: KVCache) -> None:
    """Everything that was asked for arrives and is placed."""
    while lower_of(cache)._prefetcher.read_one():
        cache.receive()
    cache.receive()
    cache.check_integrity()


def fetched(cache: KVCache, tokens: Sequence[int], salt: bytes = b"") -> BlockTable:
    """What a scheduler does with a prompt: fetch, wait, and begin with what is found."""
    fetch = cache.fetch(tokens, salt)
    read(cache)
    if fetch is not None:
        assert not cache.is_loading(fetch)
    table = start(cache, tokens, salt)
    assert table is not None
    if fetch is not None:
        cache.end_fetch(fetch)
    cache.check_integrity()
    return table


def seen_twice(cache: KVCache, tokens: Sequence[int], salt: bytes = b"") -> None:
    """The prompt is read, and found again."""
    for _ in range(2):
        table = start(cache, tokens, salt)
        assert table is not None
        cache.release(table)
