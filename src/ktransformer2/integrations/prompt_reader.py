"""Prompts into block tables: what is cached is found, equal rows are forked, the rest is computed in chunks.

Knows no transformers cache and no padding. Invariant: where reading fails nothing is held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ktransformer2.cache.block import BlockTable
from ktransformer2.errors import OutOfMemoryError
from ktransformer2.integrations.batch_rows import BatchRows
from ktransformer2.models.batch import CausalModel, FlatBatch

_TIER_WAIT_S = 0.01  # between two looks at what has come up


class PromptReader:
    """Reads the prompts of one batch; `rows` says which cache and how far back its tables can be taken."""

    def __init__(self, model: CausalModel, rows: BatchRows, chunk_tokens: int) -> None:
        self._model, self._rows, self._chunk_tokens = model, rows, chunk_tokens
        self._cache = rows.cache
        self._pack: list[tuple[BlockTable, list[int]]] = []  # tables that are read together, and their tokens
        self._prompts: Sequence[list[int]] = ()
        self.cached_tokens = 0

    def read(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[BlockTable]:
        """Tables that hold the first `lengths[i]` tokens of every prompt.

        Raises: OutOfMemoryError; nothing is held then.
        """
        self._prompts = prompts
        self._cache.receive()  # what came too late for an earlier prompt
        tables: list[BlockTable] = []
        equal: dict[tuple[int, ...], BlockTable] = {}
        try:
            for prompt, length in zip(prompts, lengths, strict=True):
                tokens = prompt[:length]
                twin = equal.get(tuple(tokens))
                if twin is not None:
                    self._compute()
                    tables.append(self._cache.fork(twin))
                    self.cached_tokens += length
                else:
                    table = equal[tuple(tokens)] = self._rows.new_table()
                    tables.append(table)
                    self._find(table, prompt, tokens)
            self._compute()
        except BaseException:
            for table in tables:
                self._cache.release(table)
            self._cache.hand_over()
            raise
        return tables

    def _find(self, table: BlockTable, prompt: list[int], tokens: list[int]) -> None:
        """The table adopts what is cached of its tokens; the rest waits in the pack."""
        one_more = prompt[: len(tokens) + 1]  # a match leaves the last token out
        self._bring_up(one_more)
        match = self._cache.match(one_more, self._rows.salt)
        if self._would_repeat(match.num_tokens, tokens):
            self._compute()
            match = self._cache.match(one_more, self._rows.salt)
        if not self._cache.allocate(table, 0, match):
            raise self._no_room()
        self.cached_tokens += table.num_tokens
        self._pack.append((table, tokens))

    def _bring_up(self, prompt: list[int]) -> None:
        """Wait for what tiers have of a prompt and the device lacks, as long as that is worth it."""
        fetch = self._cache.fetch(prompt, self._rows.salt)
        if fetch is None:
            return
        try:
            while self._cache.is_loading(fetch):
                self._cache.wait_for_tiers(_TIER_WAIT_S)
                self._cache.receive()
        finally:
            self._cache.end_fetch(fetch)

    def _would_repeat(self, num_cached: int, tokens: list[int]) -> bool:
        """Whether a row of the pack computes the block that comes next in `tokens`: then it is better waited for."""
        size = self._cache.config.block_tokens
        end = num_cached // size * size + size
        return len(tokens) >= end and any(row[:end] == tokens[:end] for _, row in self._pack)

    def _compute(self) -> None:
        """All rows of the pack are read. Side effects: full blocks are published; the pack is empty."""
        while todo := [(table, tokens) for table, tokens in self._pack if table.num_tokens < len(tokens)]:
            step: list[tuple[BlockTable, list[int]]] = []
            room = self._chunk_tokens
            for table, tokens in todo:
                new = tokens[table.num_tokens : table.num_tokens + room]
                if new:
                    if not self._cache.allocate(table, len(new)):
                        raise self._no_room()
                    step.append((table, new))
                    room -= len(new)
            self._forward(step)
            self._cache.maintain()
        self._pack = []

    def _forward(self, step: Sequence[tuple[BlockTable, list[int]]]) -> None:
        ids = torch.tensor([token for _, new in step for token in new])
        positions = torch.cat([torch.arange(t.next_position, t.next_position + len(new)) for t, new in step])
        kv = self._cache.prepare([(table, len(new)) for table, new in step])
        began_s = time.monotonic()
        self._model.forward(FlatBatch(ids, positions, kv, torch.tensor([len(ids) - 1])))
        for table, new in step:
            self._cache.publish(table, new)
        self._cache.computed(len(ids), time.monotonic() - began_s)

    def _no_room(self) -> OutOfMemoryError:
        lengths = [len(prompt) for prompt in self._prompts]
        need = sum(self._cache.bytes_for(length, self._chunk_tokens) for length in lengths)
        have, fits = self._cache.config.memory_bytes, self._cache.capacity_tokens(self._chunk_tokens)
        return OutOfMemoryError(
            f"prompts of {sum(lengths)} tokens in {len(lengths)} rows need {need / 1e6:.1f} MB and memory="
            f"{have / 1e6:.1f} MB is the limit: one row of up to {fits} tokens fits. Attach with more memory=, or with "
            "kv='int8'"
        )
