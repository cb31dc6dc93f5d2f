"""KVCache by hand: exact expectations for finding, sharing, editing, evicting and refusing."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from ktransformer2.cache.block import BLOCK, RELEASED
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.errors import ConfigError, EngineClosedError, OwnershipError
from ktransformer2.layout import ExtentLayout, Form
from tests.cache.factories import (
    FULL_GROUP,
    WINDOW_GROUP,
    Clock,
    append,
    assert_rows,
    compute,
    geometry,
    make_cache,
    start,
)

BOTH = pytest.mark.parametrize("kv", ["full", "int8"])
PROMPT = list(range(100, 150))  # 3 blocks of 16 and 2 rows


@BOTH
def test_a_later_request_finds_the_prefix(kv: str) -> None:
    cache = make_cache(kv=kv)
    first = start(cache, PROMPT)
    assert first is not None
    assert cache.match([*PROMPT, 7, 8]).num_tokens == 48  # the filling block belongs to a running table
    cache.release(first)
    # At model precision the last rows are findable too; below it a match ends on a block boundary.
    assert cache.match([*PROMPT, 7, 8]).num_tokens == (50 if kv == "full" else 48)
    assert cache.match(PROMPT).num_tokens == (49 if kv == "full" else 48)
    assert cache.match(PROMPT[:20]).num_tokens == (19 if kv == "full" else 16)
    assert cache.match([1, *PROMPT]).num_tokens == 0
    assert cache.match([1]).num_tokens == 0
    second = start(cache, [*PROMPT, 7, 8])
    assert second is not None
    assert second.cached_tokens == (50 if kv == "full" else 48)
    assert_rows(cache, second, [*PROMPT, 7, 8])
    cache.check_integrity()


@BOTH
def test_generated_tokens_are_findable(kv: str) -> None:
    cache = make_cache(kv=kv)
    table = start(cache, PROMPT)
    assert table is not None
    for token in range(30):
        assert append(cache, table, [token])
    cache.release(table)
    turn_2 = [*PROMPT, *range(30), 9, 9, 9]
    assert cache.match(turn_2).num_tokens == 80
    again = start(cache, turn_2)
    assert again is not None
    assert_rows(cache, again, turn_2)


@BOTH
def test_another_salt_never_hits(kv: str) -> None:
    cache = make_cache(kv=kv)
    table = start(cache, PROMPT, salt=b"alice")
    assert table is not None
    cache.release(table)
    assert cache.match(PROMPT, b"bob").num_tokens == 0
    assert cache.match(PROMPT).num_tokens == 0
    assert cache.match(PROMPT, b"alice").num_tokens >= 48


@BOTH
@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 50])
def test_chunks_give_the_same_rows(kv: str, chunk: int) -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv=kv)
    table = cache.new_table()
    for at in range(0, 50, chunk):
        assert append(cache, table, PROMPT[at : at + chunk])
        cache.check_integrity()
    assert_rows(cache, table, PROMPT)


def test_sealing_gives_back_the_rows_as_computed() -> None:
    cache = make_cache(kv="int8")
    full = ExtentLayout.uniform(FULL_GROUP, 16, Form.FP32).extent_bytes
    sealed = ExtentLayout.uniform(FULL_GROUP, 16, Form.INT8).extent_bytes
    table = start(cache, PROMPT)
    assert table is not None
    assert cache.stats().used_bytes == 3 * sealed + full
    assert append(cache, table, range(14))  # the filling block becomes full
    assert cache.stats().used_bytes == 4 * sealed
    assert cache.stats().num_filling_blocks == 0


def test_a_window_lets_blocks_go_while_the_sequence_runs() -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP)
    table = cache.new_table()
    for i in range(20):
        assert append(cache, table, range(16 * i, 16 * i + 16))
    released = table.groups[1].entries[:, BLOCK] == RELEASED
    # The next query, index 320, sees 281..320: blocks 17, 18 and 19.
    assert released.tolist() == [True] * 17 + [False] * 3
    assert not (table.groups[0].entries[:, BLOCK] == RELEASED).any()
    cache.check_integrity()
    # Released blocks are cached until their room is needed, and a hit only needs what its window sees.
    assert cache.match([*range(320), 5]).num_tokens == 320
    cache.release(table)
    again = start(cache, [*range(320), 5])
    assert again is not None
    assert again.cached_tokens == 320
    assert_rows(cache, again, [*range(320), 5])


def test_eviction_takes_the_oldest_leaf_first() -> None:
    clock = Clock()
    cache = make_cache(clock=clock)
    for name in (1, 2):
        clock.now = name
        table = start(cache, [name] * 48)
        assert table is not None
        cache.release(table)
    clock.now = 3.0

    def held(name: int) -> int:
        return cache.match([name] * 49).num_tokens

    assert (held(1), held(2)) == (48, 48)
    expected = [(32, 48), (16, 48), (0, 48), (0, 32), (0, 16), (0, 0)]
    for state in expected:
        assert cache._residency.evict_one("room")
        assert (held(1), held(2)) == state
    assert not cache._residency.evict_one("room")


@BOTH
def test_no_room_is_an_answer_and_changes_nothing(kv: str) -> None:
    cache = make_cache(kv=kv, memory_bytes=256 * 1024, min_chunk_tokens=16)
    capacity = cache.capacity_tokens()
    table = start(cache, list(range(capacity)))
    assert table is not None
    before = (table.num_tokens, cache.stats().used_bytes)
    assert not cache.allocate(table, 200)
    assert (table.num_tokens, cache.stats().used_bytes) == before
    assert table.pending == 0
    other = cache.new_table()
    assert not cache.allocate(other, 200, cache.match([5] * 200))
    cache.check_integrity()
    assert cache.stats().committed_bytes <= 256 * 1024
    cache.release(table)
    assert cache.allocate(other, 200)  # cached blocks make room
    cache.check_integrity()


@BOTH
def test_forks_share_until_they_write(kv: str) -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv=kv)
    table = start(cache, PROMPT)
    assert table is not None
    used = cache.stats().used_bytes
    forks = [cache.fork(table) for _ in range(3)]
    assert cache.stats().used_bytes == used
    for i, fork in enumerate(forks):
        assert append(cache, fork, [i, i + 1])
    assert append(cache, table, [77])
    cache.check_integrity()
    for i, fork in enumerate(forks):
        assert_rows(cache, fork, [*PROMPT, i, i + 1])
    assert_rows(cache, table, [*PROMPT, 77])
    for one in (table, *forks):
        cache.release(one)
    cache.check_integrity()
    cache.clear()
    assert cache.stats().num_blocks == 0


@BOTH
def test_rollback_is_exact(kv: str) -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv=kv, max_rollback_tokens=20)
    table = start(cache, PROMPT)
    assert table is not None
    for back, new in ((3, [1, 2, 3, 4]), (20, [9] * 30), (0, [4]), (17, [5])):
        tokens = [*table.tokens[: table.num_tokens - back], *new]
        assert cache.rollback(table, back)
        cache.check_integrity()
        assert append(cache, table, new)
        assert_rows(cache, table, tokens)


def test_a_rollback_past_its_reach_is_refused_and_loses_nothing() -> None:
    cache = make_cache(kv="int8")
    table = start(cache, PROMPT)
    assert table is not None
    assert cache.rollback(table, 1)  # still in the filling block
    assert cache.rollback(table, 1)  # exactly onto a block boundary
    with pytest.raises(ConfigError, match=r"cannot take back 3 of .*max_rollback_tokens=0"):
        cache.rollback(table, 3)
    assert_rows(cache, table, PROMPT[:48])


def test_rollback_in_a_shared_block_leaves_the_other_table_alone() -> None:
    cache = make_cache()
    table = start(cache, PROMPT)
    assert table is not None
    fork = cache.fork(table)
    assert cache.rollback(fork, 10)
    assert append(cache, fork, [1] * 12)
    assert_rows(cache, table, PROMPT)
    assert_rows(cache, fork, [*PROMPT[:40], *[1] * 12])
    cache.check_integrity()


def test_a_table_may_have_a_reach_of_its_own() -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv="int8")
    table, other = cache.new_table(), cache.new_table()
    table.rollback_tokens = 20
    for each in (table, other):
        assert append(cache, each, PROMPT)
    fork = cache.fork(table)
    for each in (table, fork):
        assert cache.rollback(each, 20)
        assert append(cache, each, [3] * 25)
        assert_rows(cache, each, [*PROMPT[:30], *[3] * 25])
    with pytest.raises(ConfigError, match=r"cannot take back 20 of .*max_rollback_tokens=0"):
        cache.rollback(other, 20)
    cache.check_integrity()


def test_a_truncated_table_keeps_the_rows_it_has_and_is_found_no_more() -> None:
    cache = make_cache(kv="int8")
    table = start(cache, PROMPT)
    assert table is not None
    assert cache.truncate(table, 10)  # 40 tokens: the third block is cut, and has only its sealed rows
    assert_rows(cache, table, PROMPT[:40])
    assert append(cache, table, [7] * 24)
    assert_rows(cache, table, [*PROMPT[:40], *[7] * 24])
    cache.check_integrity()
    cache.release(table)
    assert cache.match([*PROMPT[:40], *[7] * 24]).num_tokens == 32  # two blocks that were never cut
    assert cache.match(PROMPT).num_tokens == 48  # the third one is whole where it was published
    cache.check_integrity()


def test_truncating_in_full_form_is_a_rollback() -> None:
    cache = make_cache(kv="full")
    table = start(cache, PROMPT)
    assert table is not None
    assert cache.truncate(table, 10)
    assert append(cache, table, [7] * 24)
    cache.release(table)
    assert cache.match([*PROMPT[:40], *[7] * 24, 1]).num_tokens == 64


def test_a_truncation_into_what_a_window_let_go_is_refused() -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP)
    table = start(cache, list(range(200)))
    assert table is not None
    with pytest.raises(ConfigError, match=r"cannot take back 150 tokens.*sliding window"):
        cache.truncate(table, 150)
    assert_rows(cache, table, list(range(200)))


def test_a_callers_bytes_count_against_the_limit() -> None:
    cache = make_cache(memory_bytes=2**20)
    assert cache.charge(2**19)
    assert not cache.charge(2**20)
    cache.discharge(2**19)
    assert cache.charge(2**20 - 2**16)
    assert start(cache, list(range(500))) is None
    cache.discharge(2**20 - 2**16)
    assert start(cache, list(range(500))) is not None


@BOTH
def test_defragmentation_keeps_every_row(kv: str) -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv=kv)
    tables = [start(cache, [i, *range(60)]) for i in range(40)]
    for table in tables[::2]:
        assert table is not None
        cache.release(table)
    cache._residency.evict_all()
    assert cache.defragment() > 0
    cache.check_integrity()
    for i, table in enumerate(tables):
        if i % 2:
            assert table is not None
            assert_rows(cache, table, [i, *range(60)])


def test_shift_closes_the_block_and_moves_the_next_position() -> None:
    cache = make_cache()
    table = start(cache, PROMPT)
    assert table is not None
    cache.shift(table, 100)
    assert table.next_position == 150
    assert append(cache, table, [1, 2, 3])
    assert table.groups[0].entries[:, 1:].tolist() == [[0, 16, 100]] * 3 + [[0, 2, 100], [0, 3, 0]]
    cache.shift(table, -100)
    assert table.next_position == 53
    assert table.groups[0].entries[:, 3].tolist() == [0, 0, 0, 0, -100]
    cache.check_integrity()
    cache.release(table)
    # What was made at moved positions is never found by a plain request.
    assert cache.match([*PROMPT, 1, 2, 3, 4]).num_tokens == 48


def test_drop_closes_up_by_a_shift() -> None:
    cache = make_cache()
    table = start(cache, PROMPT)
    assert table is not None
    ids = table.groups[0].entries[:, BLOCK].tolist()
    cache.drop(table, 20, 28)  # inside block 1
    assert table.groups[0].entries.tolist() == [
        [ids[0], 0, 16, 0],
        [ids[1], 0, 4, 0],
        [ids[1], 12, 4, -8],
        [ids[2], 0, 16, -8],
        [ids[3], 0, 2, -8],
    ]
    cache.check_integrity()
    cache.drop(table, 10, 30)
    assert table.groups[0].entries.tolist() == [[ids[0], 0, 10, 0], [ids[2], 6, 10, -28], [ids[3], 0, 2, -28]]
    assert list(table.tokens) == [*PROMPT[:10], *PROMPT[38:]]
    assert table.next_position == 22
    cache.check_integrity()
    assert append(cache, table, [1])
    cache.release(table)
    cache.check_integrity()


def test_a_model_that_cannot_be_shifted_refuses() -> None:
    plain = make_cache()
    cache = KVCache(geometry(FULL_GROUP, shift_refused="dynamic NTK scaling"), plain.config)
    table = start(cache, PROMPT)
    assert table is not None
    with pytest.raises(ConfigError, match="dynamic NTK scaling"):
        cache.shift(table, 1)
    assert_rows(cache, table, PROMPT)


@BOTH
def test_an_abandoned_step_leaves_no_trace(kv: str) -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv=kv)
    table = start(cache, PROMPT)
    assert table is not None
    used = cache.stats().used_bytes
    assert cache.allocate(table, 60)
    cache.abandon(table)
    assert cache.stats().used_bytes == used
    cache.check_integrity()
    assert append(cache, table, [3] * 15)
    assert_rows(cache, table, [*PROMPT, *[3] * 15])


def test_idle_and_surplus_blocks_leave_in_maintain() -> None:
    clock = Clock()
    cache = make_cache(clock=clock, cached_idle_s=300)
    table = start(cache, PROMPT)
    assert table is not None
    cache.release(table)
    clock.now = 299
    cache.maintain(finished_requests=1)
    assert cache.stats().num_cached_blocks == 4
    clock.now = 301
    cache.maintain()
    assert cache.stats().num_cached_blocks == 0
    assert cache.stats().evictions == {"idle": 4}

    small = make_cache(memory_bytes=2**20, cached_share_ratio=0.1)
    table = start(small, PROMPT)
    assert table is not None
    small.release(table)
    small.maintain(finished_requests=1)
    assert small.stats().cached_bytes <= 2**20 // 10


def test_a_ragged_batch_shares_one_step() -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv="int8")
    prompts = [list(range(n)) for n in (1, 16, 17, 70)]
    tables = [cache.new_table(publish=False) for _ in prompts]
    for table, prompt in zip(tables, prompts, strict=True):
        assert cache.allocate(table, len(prompt))
    (full, window) = cache.prepare([(t, len(p)) for t, p in zip(tables, prompts, strict=True)])
    assert full.query_starts.tolist() == [0, 1, 17, 34, 104]
    assert full.context_lens.tolist() == [0, 0, 0, 0]
    assert [row for _, row in full.seals.tolist()] == [1, 17, 34, 50, 66, 82]
    assert window.entry_starts.tolist() == [0, 1, 2, 4, 9]
    compute(cache, list(zip(tables, prompts, strict=True)))
    for table, prompt in zip(tables, prompts, strict=True):
        assert_rows(cache, table, prompt)


def test_a_second_thread_and_a_forked_child_are_refused() -> None:
    cache = make_cache()
    assert start(cache, PROMPT) is not None
    caught: list[BaseException] = []

    def use() -> None:
        try:
            cache.new_table()
        except OwnershipError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert "a second thread" in str(caught[0])
    child = multiprocessing.get_context("fork").Process(target=_expect_ownership_error, args=(cache,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    cache.check_integrity()


def _expect_ownership_error(cache: KVCache) -> None:
    with pytest.raises(OwnershipError, match="a child process after fork"):
        cache.new_table()


def test_a_closed_cache_says_so() -> None:
    cache = make_cache()
    cache.close()
    cache.close()
    with pytest.raises(EngineClosedError, match="closed"):
        cache.new_table()


def test_memory_goes_back_after_clear() -> None:
    cache = make_cache()
    for i in range(20):
        table = start(cache, [i] * 200)
        assert table is not None
        cache.release(table)
    assert cache.stats().committed_bytes > 10**6
    assert cache.clear() > 10**6
    assert cache.stats().committed_bytes == 0
    assert cache.resident_bytes() == 0
    cache.check_integrity()


@BOTH
def test_capacity_holds_what_it_says_also_with_a_window_and_large_steps(kv: str) -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv=kv, memory_bytes=600 * 1024, min_chunk_tokens=16)
    capacity = cache.capacity_tokens(chunk_tokens=128)
    assert cache.bytes_for(capacity, 128) <= 600 * 1024 < cache.bytes_for(capacity + 16, 128)
    table = cache.new_table()
    for at in range(0, capacity, 128):
        assert append(cache, table, [7] * min(128, capacity - at))
    assert table.num_tokens == capacity
    assert not cache.allocate(table, 129)
    cache.check_integrity()


@BOTH
def test_a_rollback_without_room_for_its_copy_changes_nothing(kv: str) -> None:
    cache = make_cache(
        FULL_GROUP, WINDOW_GROUP, kv=kv, memory_bytes=300 * 1024, min_chunk_tokens=16, max_rollback_tokens=40
    )
    table = start(cache, PROMPT)
    assert table is not None
    fork = cache.fork(table)
    hogs = []
    while (hog := start(cache, [5])) is not None:
        hogs.append(hog)
    assert not cache.rollback(fork, 10)
    cache.check_integrity()
    assert_rows(cache, fork, PROMPT)
    for hog in hogs:
        cache.release(hog)
    assert cache.rollback(fork, 10)
    assert append(cache, fork, [1, 2])
    assert_rows(cache, fork, [*PROMPT[:40], 1, 2])
    assert_rows(cache, table, PROMPT)


def test_a_fork_keeps_its_own_reach_when_the_other_goes_on() -> None:
    cache = make_cache(kv="int8", max_rollback_tokens=40)
    table = start(cache, PROMPT)
    assert table is not None
    fork = cache.fork(table)
    assert append(cache, table, [1] * 100)
    assert cache.rollback(fork, 40)
    assert append(cache, fork, [2] * 10)
    assert_rows(cache, fork, [*PROMPT[:10], *[2] * 10])
    cache.check_integrity()


def test_a_block_that_a_shift_closed_is_still_sealed_when_a_fork_fills_it() -> None:
    cache = make_cache(kv="int8")
    table = start(cache, PROMPT[:10])
    assert table is not None
    fork = cache.fork(table)
    cache.shift(table, 5)
    cache.release(table)
    assert append(cache, fork, PROMPT[10:16])
    block = cache._residency.stores[0].block(int(fork.groups[0].entries[0, BLOCK]))
    assert block.indexed
    assert block.open_extent == 0
    assert_rows(cache, fork, PROMPT[:16])
    cache.check_integrity()


def test_a_request_in_vain_costs_nobody_a_prefix() -> None:
    cache = make_cache(memory_bytes=2**20)
    table = start(cache, PROMPT)
    assert table is not None
    cache.release(table)
    other = cache.new_table()
    assert not cache.allocate(other, 100_000, cache.match([1, 2, 3]))
    assert cache.stats().evictions == {}
    assert cache.match([*PROMPT, 1]).num_tokens == 50


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_a_row_that_the_filling_block_takes_asks_nobody_for_room(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP, kv=kv)
    table, shared = start(cache, PROMPT), start(cache, [7] * 20)
    assert table is not None
    assert shared is not None
    cache.fork(shared)
    with monkeypatch.context() as full:
        full.setattr(cache._residency, "could_hold", lambda num_bytes: False)
        full.setattr(cache._residency, "charge", lambda num_bytes: False)
        for token in range(13):  # the filling block has 2 rows of 16
            assert append(cache, table, [token])
        assert not append(cache, table, [13])  # a full one may need another extent
        assert not append(cache, shared, [7])  # and a shared one is copied first
    assert append(cache, table, [13])
    assert_rows(cache, table, [*PROMPT, *range(14)])
    cache.check_integrity()


def test_a_drop_that_would_bare_what_a_window_let_go_is_refused() -> None:
    cache = make_cache(FULL_GROUP, WINDOW_GROUP)
    table = start(cache, [7] * 320)
    assert table is not None
    for _ in range(4):
        assert append(cache, table, [7])
    entries = table.groups[1].entries.copy()
    with pytest.raises(ConfigError, match="sliding window have let go rows"):
        cache.drop(table, 200, 324)
    assert (table.groups[1].entries == entries).all()
    cache.drop(table, 10, 250)  # what all windows have passed
    assert table.num_tokens == 84
    cache.check_integrity()


def test_tables_are_counted_and_shrink() -> None:
    cache = make_cache(memory_bytes=256 * 2**20)
    tables = [start(cache, [i] * 16) for i in range(300)]
    page_tables = 2 * 512 * 2 * 8  # page table and open table, 512 rows, two layers, 8 bytes
    block_tables = 300 * 2 * (4 * 16 + 73 + 32)  # two blocks: tokens, the key, an entry's room
    assert cache.stats().table_bytes == page_tables + block_tables
    for table in tables:
        assert table is not None
        cache.release(table)
    cache.clear()
    assert cache.stats().table_bytes == 0
    assert start(cache, PROMPT) is not None
    cache.check_integrity()


def test_the_order_of_eviction_is_kept_in_bounded_space() -> None:
    clock = Clock()
    cache = make_cache(clock=clock)
    keeper = start(cache, [3] * 16)
    assert keeper is not None
    cache.release(keeper)
    for _ in range(2000):
        table = start(cache, PROMPT)
        assert table is not None
        clock.now += 1
        cache.release(table)
    assert len(cache._residency.retention) == len(cache._residency.indexes[0])


def test_a_prompt_is_hashed_once() -> None:
    cache = make_cache(kv="int8")
    table = start(cache, PROMPT)
    assert table is not None
    chain: list[bytes] = []
    assert cache.match(PROMPT, chain=chain).num_tokens == 48
    assert chain == table.keys
    marked = [*chain]
    assert cache.match([*PROMPT, 1, 2], chain=chain).keys == tuple(marked)
    other: list[bytes] = []
    assert cache.match([*PROMPT[:20], *range(90)], chain=other).num_tokens == 16
    assert len(other) == 2  # the miss is remembered too
