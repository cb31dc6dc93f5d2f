"""Blocks one by one, a page at a time."""

from __future__ import annotations

import pytest

from ktransformer2.cache.listing import BlockPage, ListedBlock
from tests.cache.factories import FULL_GROUP, WINDOW_GROUP, Clock, make_cache, start


def test_states_sizes_and_ages() -> None:
    clock = Clock()
    cache = make_cache(clock=clock, kv="int8")
    done = start(cache, list(range(20)))
    assert done is not None
    clock.now = 2.0
    cache.release(done)
    running = start(cache, list(range(100, 120)))
    assert running is not None
    other = cache.fork(running)
    clock.now = 5.0
    full, sealed = (
        layout.extent_bytes
        for layout in (cache._residency.stores[0].open_layout, cache._residency.stores[0].sealed_layout)
    )
    assert cache.list_blocks() == BlockPage(
        (
            ListedBlock(0, 0, "cached", 16, sealed, 0, 5.0, 3.0),
            ListedBlock(0, 1, "sealed", 16, sealed, 2, 3.0, None),
            ListedBlock(0, 2, "filling", 4, full, 2, None, None),
        ),
        None,
    )
    cache.release(other)


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_pages_hold_every_block_once(limit: int) -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP)
    tables = [start(cache, [number] * 100) for number in range(3)]
    middle = tables[1]
    assert middle is not None
    cache.release(middle)
    cache.clear()  # holes between ids
    found, at = [], 0
    while True:
        page = cache.list_blocks(at, limit)
        assert len(page.blocks) <= limit
        found += [(block.group, block.block_id) for block in page.blocks]
        if page.next_start is None:
            break
        at = page.next_start
    stores = cache._residency.stores
    assert found == [(store.index, block.block_id) for store in stores for block in store.live_blocks()]
    assert len(found) > 7
