"""The rows of a padded batch, as block tables: what a transformers cache is, without transformers.

transformers thinks in columns: every row of a batch has the same length, and shorter texts are padded. Here a row is a
block table that holds real tokens only; which columns are padding is remembered, so that lengths can be told and cut in
columns. Knows no layer and no model.

Invariants: a table holds as many tokens as its row has real columns; between two steps nothing is pending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.errors import OutOfMemoryError, RequestError
from ktransformer2.kernels.batch import KVBatch

UNKNOWN_TOKEN = -1  # of rows whose token nobody told; such tables are never published


@dataclass(frozen=True)
class PaddedStep:
    """One step of a padded batch: B rows, T new columns. `kv` is empty where every new column is padding.

    `index` int64 [N]: the real ones among the B * T new places, row by row; None: all of them.
    """

    num_rows: int
    num_new: int
    counts: tuple[int, ...]
    index: torch.Tensor | None
    kv: tuple[KVBatch, ...]

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """[B, X, T, D] -> [N, X, D], real tokens only. A view where nothing must be copied."""
        rows = values.transpose(1, 2)  # [B, T, X, D]
        rows = rows[0] if rows.shape[0] == 1 else rows.flatten(0, 1)
        return rows if self.index is None else rows[self.index]

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """[N, X, D] -> [B, T, X, D]; 0 where there is padding."""
        if self.index is not None:
            rows = values.new_zeros(self.num_rows * self.num_new, *values.shape[1:])
            values = rows.index_copy_(0, self.index, values)
        return values.view(self.num_rows, self.num_new, *values.shape[1:])


class BatchRows:
    """B block tables and their columns."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.tables: list[BlockTable] = []
        self.num_columns = 0
        self.rollback_tokens = cache.config.max_rollback_tokens
        self._has_windows = any(group.window is not None for group in cache.geometry.groups)
        self._real: torch.Tensor | None = None  # bool [B, num_columns]; None: no column is padding

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def has_padding(self) -> bool:
        return self._real is not None

    # --- a step

    def check_mask(self, mask: torch.Tensor, num_new: int) -> torch.Tensor | None:
        """bool [B, T]: the real ones of the `num_new` newest columns of mask [B, columns]; None: all of them.

        Raises: RequestError where the mask hides what was stored as real, or shows what was padding.
        """
        seen, mask = self.num_columns, mask.to(torch.bool)
        if mask.shape[1] != seen + num_new:
            raise RequestError(
                f"the attention mask has {mask.shape[1]} columns; the cache holds {seen} and the call brings {num_new} "
                f"more, so {seen + num_new} are wanted"
            )
        old, new = mask[:, :seen], mask[:, seen:]
        if not (bool(old.all()) if self._real is None else torch.equal(old, self._real)):
            raise RequestError(
                "the attention mask of this call hides or shows other tokens than those the cache holds; give the mask "
                "of the earlier calls with that of the new tokens behind it, or begin with an empty cache"
            )
        if self._has_windows and _has_holes(mask):
            raise RequestError(
                "the attention mask has padding between tokens, where a sliding window would count it; pad on the left"
            )
        return None if bool(new.all()) else new

    def begin(self, num_rows: int, num_new: int, real: torch.Tensor | None) -> PaddedStep:
        """Room for `num_new` columns, those in `real` bool [B, T] (None: all) stored; the kernels' view of the step.

        Raises: OutOfMemoryError, RequestError where the batch has another size; nothing has changed.
        """
        fresh = not self.tables
        tables = self.tables or [self._new_table() for _ in range(num_rows)]
        if len(tables) != num_rows:
            raise RequestError(
                f"the cache holds {len(tables)} rows and was called with a batch of {num_rows}; use one cache for one "
                "batch, or change its rows with batch_repeat_interleave or batch_select_indices"
            )
        counts = (num_new,) * num_rows if real is None else tuple(real.sum(dim=1).tolist())
        for i, (table, count) in enumerate(zip(tables, counts, strict=True)):
            if not self.cache.allocate(table, count):
                for earlier in tables[:i]:
                    self.cache.abandon(earlier)
                raise self._no_room(tables, counts)
        if fresh:
            self.tables = tables
        step = [(table, count) for table, count in zip(tables, counts, strict=True) if count]
        index = None if real is None else real.flatten().nonzero().squeeze(1)
        return PaddedStep(num_rows, num_new, counts, index, self.cache.prepare(step) if step else ())

    def publish(self, step: PaddedStep, token_ids: torch.Tensor | None) -> None:
        """The step's rows are computed. `token_ids` [B, T]; None: nobody told, and the tables are found no more."""
        ids = (
            None
            if token_ids is None
            else token_ids.flatten()
            if step.index is None
            else (token_ids.flatten()[step.index])
        )
        start = 0
        known = None if ids is None else ids.tolist()
        for table, count in zip(self.tables, step.counts, strict=True):
            if known is None:
                table.publishes = False
            self.cache.publish(table, known[start : start + count] if known is not None else [UNKNOWN_TOKEN] * count)
            start += count
        self.append_columns(step.num_new, None if step.index is None else self._as_real(step))

    def append_columns(self, num_new: int, real: torch.Tensor | None) -> None:
        """The rows have `num_new` more columns; `real` bool [B, num_new], None: no padding among them."""
        if real is not None or self._real is not None:
            shape = (len(self.tables), num_new)
            before = (
                torch.ones(len(self.tables), self.num_columns, dtype=torch.bool) if self._real is None else self._real
            )
            self._real = torch.cat([before, torch.ones(shape, dtype=torch.bool) if real is None else real], dim=1)
        self.num_columns += num_new

    def abandon(self) -> None:
        """The step failed: what was allocated for it is forgotten."""
        for table in self.tables:
            if table.pending:
                self.cache.abandon(table)

    # --- rows and columns

    def adopt(self, tables: Sequence[BlockTable], num_columns: int, real: torch.Tensor | None) -> None:
        """Take these tables as the rows of an empty batch."""
        assert not self.tables, f"{len(self.tables)} rows are there already"
        self.tables = list(tables)
        self.append_columns(num_columns, real)

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was. Copies share their blocks until one of them goes on."""
        taken: set[int] = set()
        tables = []
        for row in rows:
            tables.append(self.cache.fork(self.tables[row]) if row in taken else self.tables[row])
            taken.add(row)
        for row in sorted(set(range(len(self.tables))) - taken):
            self.cache.release(self.tables[row])
        self.tables = tables
        if self._real is not None:
            self._real = self._real[list(rows)]

    def copy(self) -> BatchRows:
        """Other rows over the same blocks."""
        other = BatchRows(self.cache)
        other.tables = [self.cache.fork(table) for table in self.tables]
        other.num_columns, other.rollback_tokens, other._real = self.num_columns, self.rollback_tokens, self._real
        return other

    def crop(self, num_columns: int) -> None:
        """Take the last `num_columns` columns back.

        Raises: ConfigError where a sliding window let go what would come into view; OutOfMemoryError.
        """
        keep = max(0, self.num_columns - num_columns)
        for row, table in enumerate(self.tables):
            kept = keep if self._real is None else int(self._real[row, :keep].sum())
            if not self.cache.truncate(table, table.num_tokens - kept):
                raise OutOfMemoryError("there is no room for the copy of a block that two rows share; raise memory=")
        self.num_columns = keep
        if self._real is not None:
            self._real = self._real[:, :keep]

    def release(self) -> None:
        """No rows any more. Blocks that are published stay cached."""
        for table in self.tables:
            self.cache.release(table)
        self.tables = []
        self.num_columns, self._real = 0, None

    def set_rollback(self, num_tokens: int) -> None:
        """From now on so many tokens can be taken back exactly."""
        self.rollback_tokens = num_tokens
        for table in self.tables:
            table.rollback_tokens = num_tokens

    # --- inside

    def _new_table(self) -> BlockTable:
        table = self.cache.new_table()
        table.rollback_tokens = self.rollback_tokens
        return table

    def _as_real(self, step: PaddedStep) -> torch.Tensor:
        real = torch.zeros(step.num_rows * step.num_new, dtype=torch.bool)
        real[step.index] = True
        return real.view(step.num_rows, step.num_new)

    def _no_room(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> OutOfMemoryError:
        longest = max(table.num_tokens + count for table, count in zip(tables, counts, strict=True))
        need = sum(self.cache.bytes_for(table.num_tokens + n) for table, n in zip(tables, counts, strict=True))
        limit = self.cache.config.memory_bytes
        fits = self.cache.capacity_tokens() // len(tables)
        return OutOfMemoryError(
            f"{len(tables)} rows of up to {longest} tokens need {need / 1e6:.1f} MB and memory={limit / 1e6:.1f} MB is "
            f"the limit: about {fits} tokens a row fit. Raise memory=, take kv='int8', or a smaller batch"
        )


def _has_holes(mask: torch.Tensor) -> bool:
    """Whether a row of the mask [B, columns] has padding behind a token and before another one."""
    started = mask.cummax(dim=1).values
    goes_on = mask.flip(1).cummax(dim=1).values.flip(1)
    return bool((started & goes_on & ~mask).any())
