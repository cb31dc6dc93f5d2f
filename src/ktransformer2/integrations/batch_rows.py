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

    `real` bool [B, T]: the new columns that are no padding, `index` int64 [N] the same as places in the flattened
    batch; both None: all of them.
    """

    num_rows: int
    num_new: int
    counts: tuple[int, ...]
    real: torch.Tensor | None
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
    """B block tables and their columns.

    `salt`: only rows of an equal salt find each other's blocks. `left`: tables of rows whose holder is gone, from
    whatever thread; whoever takes the next step releases them. Copies share both.
    """

    def __init__(self, cache: KVCache, salt: bytes = b"", left: list[BlockTable] | None = None) -> None:
        self.cache, self.salt = cache, salt
        self.tables: list[BlockTable] = []
        self.num_columns = 0
        self.rollback_tokens = cache.config.max_rollback_tokens
        self._left: list[BlockTable] = [] if left is None else left
        self._has_windows = any(group.window is not None for group in cache.geometry.groups)
        self._real: torch.Tensor | None = None  # bool [B, num_columns]; None: no column is padding

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def has_padding(self) -> bool:
        return self._real is not None

    @property
    def lengths(self) -> list[int]:
        """Real tokens of every row."""
        return [table.num_tokens for table in self.tables]

    # --- a step

    def new_columns(self, mask: torch.Tensor | None, num_new: int) -> torch.Tensor | None:
        """bool [B, T]: the real ones of the `num_new` newest columns of mask [B, columns]; None: all of them.

        Raises: RequestError where the mask hides what was stored as real, or shows what was padding, and where a row
        ends in padding: what follows would be read from a column that has no token.
        """
        seen = self.num_columns
        if mask is None:
            if self._real is not None:
                raise RequestError(
                    "the cache holds padded rows and this call has no attention mask, which would show their padding; "
                    "give the mask of the earlier calls with that of the new tokens behind it"
                )
            return None
        mask = mask.to(torch.bool)
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
        if ends_in_padding(mask):
            raise RequestError(
                "a row of the attention mask ends in padding, whose column the next token would be read from; pad on "
                'the left: tokenizer.padding_side = "left"'
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
        self.release_left()
        tables = self.tables or [self.new_table() for _ in range(num_rows)]
        if len(tables) != num_rows:
            raise RequestError(
                f"the cache holds {len(tables)} rows and was called with a batch of {num_rows}; use one cache for one "
                "batch, or change its rows with batch_repeat_interleave or batch_select_indices"
            )
        counts = (num_new,) * num_rows if real is None else tuple(real.sum(dim=1).tolist())
        for table, count in zip(tables, counts, strict=True):
            if not self.cache.allocate(table, count):
                error = self._no_room(tables, counts)
                for other in tables:
                    self._undo(other)
                raise error
        self.tables = tables
        step = [(table, count) for table, count in zip(tables, counts, strict=True) if count]
        index = None if real is None else real.flatten().nonzero().squeeze(1)
        return PaddedStep(num_rows, num_new, counts, real, index, self.cache.prepare(step) if step else ())

    def publish(self, step: PaddedStep, token_ids: torch.Tensor | None) -> None:
        """The step's rows are computed. `token_ids` [B, T]; None: nobody told, and the tables are found no more."""
        known: list[int] | None = None
        if token_ids is not None:
            ids = token_ids.flatten()
            known = (ids if step.index is None else ids[step.index]).tolist()
        start = 0
        for table, count in zip(self.tables, step.counts, strict=True):
            if known is None:
                table.publishes = False
            self.cache.publish(table, known[start : start + count] if known is not None else [UNKNOWN_TOKEN] * count)
            start += count
        self._append_columns(step.num_new, step.real)

    def abandon(self) -> None:
        """The step failed: what was allocated for it is forgotten."""
        for table in self.tables:
            self._undo(table)
        if self.tables and self.num_columns == 0:
            self.tables = []

    # --- rows and columns

    def new_table(self) -> BlockTable:
        """An empty table, as the rows have them."""
        table = self.cache.new_table(self.salt)
        table.rollback_tokens = self.rollback_tokens
        return table

    def adopt(self, tables: Sequence[BlockTable], num_columns: int, real: torch.Tensor | None) -> None:
        """Take these tables as the rows of an empty batch, `real` bool [B, num_columns] (None: no padding)."""
        assert not self.tables, f"{len(self.tables)} rows are there already"
        self.tables = list(tables)
        self._append_columns(num_columns, real)

    def are_the_start_of(self, ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether every row holds the first tokens of its row of ids [B, T], and at least one of them is left."""
        count = self.num_columns
        if len(self.tables) != ids.shape[0] or count >= ids.shape[1]:
            return False
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(torch.bool)
        if not (bool(real[:, :count].all()) if self._real is None else torch.equal(real[:, :count], self._real)):
            return False
        held = [row[keep].tolist() for row, keep in zip(ids[:, :count], real[:, :count], strict=True)]
        return all(table.tokens.tolist() == tokens for table, tokens in zip(self.tables, held, strict=True))

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was. Copies share their blocks until one of them goes on.

        Raises: IndexError for a row that is not there; nothing has changed.
        """
        count = len(self.tables)
        if any(not -count <= row < count for row in rows):
            raise IndexError(f"rows {list(rows)} are asked for and the cache holds {count}")
        places = [row % count for row in rows]
        taken: set[int] = set()
        tables = []
        for place in places:
            tables.append(self.cache.fork(self.tables[place]) if place in taken else self.tables[place])
            taken.add(place)
        for place in sorted(set(range(count)) - taken):
            self.cache.release(self.tables[place])
        self.tables = tables
        if self._real is not None:
            self._set_real(self._real[places])
        if not tables:
            self.release()

    def copy(self) -> BatchRows:
        """Other rows over the same blocks."""
        other = BatchRows(self.cache, self.salt, self._left)
        other.tables = [self.cache.fork(table) for table in self.tables]
        other.num_columns, other.rollback_tokens, other._real = self.num_columns, self.rollback_tokens, self._real
        return other

    def crop(self, num_columns: int) -> None:
        """Take the last `num_columns` columns back, or all there are.

        Raises: ConfigError where a sliding window let go what would come into view; nothing has changed.
        OutOfMemoryError: of several rows none is left then, of one row all.
        """
        keep = max(0, self.num_columns - num_columns)
        if keep == 0:
            self.release()
            return
        kept = [keep] * len(self.tables) if self._real is None else self._real[:, :keep].sum(dim=1).tolist()
        cuts = [(table, table.num_tokens - count) for table, count in zip(self.tables, kept, strict=True)]
        for table, cut in cuts:
            self.cache.refuse_truncation(table, cut)
        for table, cut in cuts:
            if not self.cache.truncate(table, cut):
                if len(cuts) > 1:
                    self.release()
                raise OutOfMemoryError(
                    "there is no room for the copy of a block that two rows share"
                    + ("; the cache is empty now" if len(cuts) > 1 else "")
                    + f"; raise memory= above {self.cache.config.memory_bytes / 1e6:.1f} MB"
                )
        self.num_columns = keep
        if self._real is not None:
            self._set_real(self._real[:, :keep])

    def release(self) -> None:
        """No rows any more. Blocks that are published stay cached."""
        self.release_left()
        for table in self.tables:
            self.cache.release(table)
        self.tables = []
        self.num_columns, self._real = 0, None

    def set_rollback(self, num_tokens: int) -> None:
        """From now on so many tokens can be taken back exactly."""
        self.rollback_tokens = num_tokens
        for table in self.tables:
            table.rollback_tokens = num_tokens

    def leave(self) -> None:
        """Nobody holds these rows any more. From any thread, at any time: the tables wait for the next step."""
        self._left.extend(self.tables)
        self.tables = []

    def release_left(self) -> None:
        """Release the tables of rows that nobody holds any more."""
        while self._left:
            self.cache.release(self._left.pop())

    # --- inside

    def _undo(self, table: BlockTable) -> None:
        """Forget a step that was allocated; a table that held nothing before holds nothing, charged bytes included."""
        if table.num_tokens:
            self.cache.abandon(table)
        else:
            self.cache.release(table)

    def _append_columns(self, num_new: int, real: torch.Tensor | None) -> None:
        if real is not None or self._real is not None:
            rows = len(self.tables)
            before = torch.ones(rows, self.num_columns, dtype=torch.bool) if self._real is None else self._real
            new = torch.ones(rows, num_new, dtype=torch.bool) if real is None else real
            self._set_real(torch.cat([before, new], dim=1))
        self.num_columns += num_new

    def _set_real(self, real: torch.Tensor) -> None:
        self._real = None if bool(real.all()) else real

    def _no_room(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> OutOfMemoryError:
        longest = max(table.num_tokens + count for table, count in zip(tables, counts, strict=True))
        need = sum(self.cache.bytes_for(table.num_tokens + n) for table, n in zip(tables, counts, strict=True))
        limit = self.cache.config.memory_bytes
        fits = self.cache.capacity_tokens() // len(tables)
        return OutOfMemoryError(
            f"{len(tables)} rows of up to {longest} tokens need {need / 1e6:.1f} MB and memory={limit / 1e6:.1f} MB is "
            f"the limit: about {fits} tokens a row fit. Raise memory=, take kv='int8', or a smaller batch"
        )


def ends_in_padding(mask: torch.Tensor) -> bool:
    """Whether the newest column of a row of the mask [B, columns] is padding behind tokens."""
    return mask.shape[1] > 0 and bool((mask.to(torch.bool).any(dim=1) & (mask[:, -1] == 0)).any())


def _has_holes(mask: torch.Tensor) -> bool:
    """Whether a row of the mask [B, columns] has padding behind a token and before another one."""
    started = mask.cummax(dim=1).values
    goes_on = mask.flip(1).cummax(dim=1).values.flip(1)
    return bool((started & goes_on & ~mask).any())
