"""A cache at work, served on a free port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.monitor import MetricsServer, serve_metrics
from tests.cache.factories import Clock, make_cache, start

TEXT = [(i * i + i // 7) % 31 for i in range(200)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> Iterator[KVCache]:
    """Has read one text twice; every block is cached, and the snapshot is of now."""
    cache = make_cache(clock=clock, kv="int8")
    for _ in range(2):
        table = start(cache, TEXT)
        assert table is not None
        cache.release(table)
    cache.maintain()
    yield cache
    cache.close()


@pytest.fixture
def server(cache: KVCache) -> Iterator[MetricsServer]:
    with serve_metrics(cache, 0, model_name="tiny") as server:
        yield server
