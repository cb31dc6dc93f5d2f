"""Columns and rows: what a padded batch is over block tables, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ktransformer2.cache.block import BlockTable
from ktransformer2.errors import ConfigError, OutOfMemoryError, RequestError
from ktransformer2.integrations.batch_rows import BatchRows
from tests.cache.factories import FULL_GROUP, WINDOW_GROUP, make_cache

REAL = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)


def step(rows: BatchRows, num_rows: int, num_new: int, real: torch.Tensor | None = None, told: bool = True) -> None:
    """One step whose tokens count up over the whole batch."""
    padded = rows.begin(num_rows, num_new, real)
    ids = torch.arange(num_rows * num_new).view(num_rows, num_new) if told else None
    rows.publish(padded, ids)


def tokens(tables: Sequence[BlockTable]) -> list[list[int]]:
    return [table.tokens.tolist() for table in tables]


def test_padding_is_taken_out_and_put_back() -> None:
    rows = BatchRows(make_cache())
    padded = rows.begin(2, 5, REAL)
    values = torch.arange(2 * 3 * 5 * 4, dtype=torch.float32).view(2, 3, 5, 4)  # [B, X, T, D]
    flat = padded.flat(values)
    assert padded.counts == (3, 5)
    assert torch.equal(flat, torch.cat([values[0, :, 2:].transpose(0, 1), values[1].transpose(0, 1)]))
    back = padded.padded(flat)  # [B, T, X, D]
    assert torch.equal(back, values.transpose(1, 2) * REAL[:, :, None, None])


def test_rows_hold_real_tokens_only() -> None:
    rows = BatchRows(make_cache())
    step(rows, 2, 5, REAL)
    assert tokens(rows.tables) == [[2, 3, 4], [5, 6, 7, 8, 9]]
    assert (rows.num_columns, rows.lengths, rows.has_padding) == (5, [3, 5], True)
    step(rows, 2, 1)
    assert (rows.num_columns, rows.lengths) == (6, [4, 6])
    rows.cache.check_integrity()


def test_a_step_of_padding_alone_stores_nothing() -> None:
    rows = BatchRows(make_cache())
    padded = rows.begin(2, 3, torch.zeros(2, 3, dtype=torch.bool))
    assert padded.kv == ()
    assert padded.padded(torch.zeros(0, 2, 4)).shape == (2, 3, 2, 4)
    rows.publish(padded, None)
    assert (rows.num_columns, rows.lengths) == (3, [0, 0])


def test_no_room_changes_nothing_not_even_what_is_charged() -> None:
    cache = make_cache(memory_bytes=80_000)
    cache.allocate(cache.new_table(), 1)  # the page tables are there
    before, charged, rows = cache.stats(), cache._arena.stats.charged_bytes, BatchRows(cache)
    with pytest.raises(OutOfMemoryError, match=r"3 rows of up to 400 tokens need .* MB and memory=0.1 MB is the limit"):
        rows.begin(3, 400, None)
    assert len(rows) == 0
    assert cache.stats().used_bytes == before.used_bytes
    assert cache._arena.stats.charged_bytes == charged
    step(rows, 3, 20)
    with pytest.raises(OutOfMemoryError):
        rows.begin(3, 400, None)
    assert (rows.lengths, rows.num_columns) == ([20, 20, 20], 20)
    step(rows, 3, 1)
    cache.check_integrity()


def test_another_batch_size_is_refused() -> None:
    rows = BatchRows(make_cache())
    step(rows, 2, 5)
    with pytest.raises(RequestError, match="holds 2 rows and was called with a batch of 3"):
        rows.begin(3, 1, None)
    step(rows, 2, 1)


@pytest.mark.parametrize(
    ("mask", "complaint"),
    [
        ([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], "has 5 columns; the cache holds 5 and the call brings 1 more"),
        ([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], "hides or shows other tokens"),
        ([[0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]], "hides or shows other tokens"),
        ([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]], "hides or shows other tokens"),
        (None, "holds padded rows and this call has no attention mask"),
    ],
)
def test_a_mask_that_does_not_go_with_what_is_held_is_refused(mask: list[list[int]] | None, complaint: str) -> None:
    rows = BatchRows(make_cache())
    step(rows, 2, 5, REAL)
    with pytest.raises(RequestError, match=complaint):
        rows.new_columns(None if mask is None else torch.tensor(mask), 1)
    assert rows.new_columns(torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]), 1) is None
    padded = rows.new_columns(torch.tensor([[0, 0, 1, 1, 1, 0, 1], [1] * 7]), 2)
    assert padded is not None
    assert padded.tolist() == [[False, True], [True, True]]


def test_a_row_that_ends_in_padding_is_refused() -> None:
    rows = BatchRows(make_cache())
    for mask in ([[1, 1, 0], [1, 1, 1]], [[0, 1, 0], [0, 0, 0]]):
        with pytest.raises(RequestError, match="pad on the left: tokenizer"):
            rows.new_columns(torch.tensor(mask), 3)
    begun = rows.new_columns(torch.tensor([[0, 0, 0], [1, 1, 1]]), 3)  # the first chunk of a row that begins later
    assert begun is not None
    assert begun.tolist() == [[False] * 3, [True] * 3]


def test_padding_between_tokens_is_refused_with_windows_alone() -> None:
    holes = torch.tensor([[1, 0, 1]])
    assert BatchRows(make_cache(FULL_GROUP)).new_columns(holes, 3) is not None
    with pytest.raises(RequestError, match="pad on the left"):
        BatchRows(make_cache(FULL_GROUP, WINDOW_GROUP)).new_columns(holes, 3)
    for fine in ([[0, 1, 1]], [[0, 0, 1]], [[0, 0, 0]]):
        assert BatchRows(make_cache(FULL_GROUP, WINDOW_GROUP)).new_columns(torch.tensor(fine), 3) is not None


def test_rows_are_chosen_repeated_and_let_go() -> None:
    rows = BatchRows(make_cache())
    step(rows, 2, 5, REAL)
    rows.select([1, -1, 0])
    assert tokens(rows.tables) == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [2, 3, 4]]
    assert len({id(table) for table in rows.tables}) == 3  # no table is two rows
    step(rows, 3, 1, told=False)
    rows.cache.check_integrity()
    rows.select([1])
    assert not rows.has_padding
    assert rows.new_columns(None, 1) is None  # no row that is left is padded
    with pytest.raises(IndexError, match=r"rows \[0, 1\] are asked for and the cache holds 1"):
        rows.select([0, 1])
    assert rows.lengths == [6]
    rows.select([])
    assert (len(rows), rows.num_columns, rows.cache.stats().used_bytes) == (0, 0, 0)


def test_columns_are_cut_in_rows_of_different_length() -> None:
    rows = BatchRows(make_cache())
    step(rows, 2, 5, REAL)
    rows.crop(2)
    assert (tokens(rows.tables), rows.num_columns) == ([[2], [5, 6, 7]], 3)
    rows.crop(1)
    assert (tokens(rows.tables), rows.has_padding) == ([[], [5, 6]], True)
    rows.crop(99)
    assert (len(rows), rows.num_columns) == (0, 0)
    rows.cache.check_integrity()


def test_a_cut_that_one_row_cannot_take_cuts_none() -> None:
    rows = BatchRows(make_cache(FULL_GROUP, WINDOW_GROUP))  # a window of 40, blocks of 16
    real = torch.ones(2, 64, dtype=torch.bool)
    real[0, :15] = False  # 49 tokens beside 64: the longer row alone has let go its first block
    step(rows, 2, 64, real)
    for _ in range(8):
        step(rows, 2, 1)
    cut = next(n for n in range(1, 60) if refused(rows, 1, n))
    assert not refused(rows, 0, cut)
    before = tokens(rows.tables)
    with pytest.raises(ConfigError, match="sliding window"):
        rows.crop(cut)
    assert (tokens(rows.tables), rows.num_columns) == (before, 72)
    rows.crop(cut - 1)
    assert rows.lengths == [57 - cut + 1, 72 - cut + 1]
    rows.cache.check_integrity()


def refused(rows: BatchRows, row: int, num_tokens: int) -> bool:
    try:
        rows.cache.refuse_truncation(rows.tables[row], num_tokens)
    except ConfigError:
        return True
    return False


def test_what_nobody_holds_is_released_by_the_next_step() -> None:
    first = BatchRows(make_cache())
    step(first, 2, 20, told=False)
    second = first.copy()
    step(second, 2, 1, told=False)
    used = first.cache.stats().used_bytes
    second.leave()
    assert first.cache.stats().used_bytes == used  # from any thread: nothing is touched
    step(first, 2, 1, told=False)
    assert first.cache.stats().used_bytes < used
    first.cache.check_integrity()
    first.release()
    assert first.cache.stats().used_bytes == 0


def test_rows_of_another_salt_find_nothing() -> None:
    cache = make_cache()
    rows = BatchRows(cache, salt=b"one")
    step(rows, 1, 33)
    rows.release()
    assert cache.match(range(33), b"one").num_tokens == 32
    assert cache.match(range(33), b"two").num_tokens == 0


def test_rows_are_compared_with_a_prompt() -> None:
    rows = BatchRows(make_cache())
    step(rows, 2, 5, REAL)
    ids = torch.tensor([[90, 91, 2, 3, 4, 50], [5, 6, 7, 8, 9, 51]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    assert rows.are_the_start_of(ids, mask)
    assert not rows.are_the_start_of(ids[:, :5], mask[:, :5])  # nothing is left to compute
    assert not rows.are_the_start_of(ids, None)
    assert not rows.are_the_start_of(ids[:1], mask[:1])
    changed = ids.clone()
    changed[1, 4] = 10
    assert not rows.are_the_start_of(changed, mask)
    step(rows, 2, 1, told=False)  # of tokens that nobody told nothing is known
    assert not rows.are_the_start_of(torch.cat([ids, ids[:, :1]], dim=1), torch.cat([mask, mask[:, 1:2]], dim=1))


def test_a_step_that_is_abandoned_leaves_no_trace() -> None:
    rows = BatchRows(make_cache())
    rows.begin(2, 40, None)
    rows.abandon()
    assert (len(rows), rows.num_columns, rows.cache.stats().used_bytes) == (0, 0, 0)
    step(rows, 3, 5)  # of another size now
    rows.begin(3, 40, None)
    rows.abandon()
    assert (rows.lengths, rows.num_columns) == ([5, 5, 5], 5)
    rows.cache.check_integrity()
