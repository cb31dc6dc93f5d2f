"""A length trace driven through `KVCache` without a model: what memory is held, step by step, and what it is held for.

The steps are those of the engine: decodes first, then prompts in chunks, in order of arrival; the newest sequence is
preempted when there is no room. Time is virtual: a step takes `STEP_S`, arrivals are the trace's; what is held is
looked at every fourth step. Nothing is written into the pages. Prompts share no prefix (the traces hold no text), so
every reuse would be a fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ktransformer2.bench.shapes import smollm2, token_bytes
from ktransformer2.bench.traces import TraceRequest
from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.kernels.batch import KVBatch
from ktransformer2.layout import Form, round_up

STEP_S = 0.05
STEPS_PER_SAMPLE = 4
_VOCABULARY = 49_152


@dataclass
class HeldOverTime:
    """Sums over virtual time. Units: bytes x seconds, tokens x seconds, ratio x seconds, seconds."""

    committed: float = 0.0
    cached: float = 0.0
    filled: float = 0.0
    static: float = 0.0
    tokens: float = 0.0
    block_tokens: float = 0.0
    fragmentation: float = 0.0
    seconds: float = 0.0


@dataclass
class ReplayFigures:
    """What a replay showed. `tokens_copied_by_growth` is counted from page addresses, not told by the cache.

    `longest_copy_bytes`: the most that the defragmenter copied between two looks.
    """

    num_requests: int
    static_tokens: int
    held: HeldOverTime = field(default_factory=HeldOverTime)
    num_steps: int = 0
    num_preemptions: int = 0
    computed_tokens: int = 0
    tokens_copied_by_growth: int = 0
    growth_events: int = 0
    system_calls: int = 0
    moved_bytes: int = 0
    longest_copy_bytes: int = 0
    peak_bytes: int = 0
    peak_static_bytes: int = 0

    @property
    def waste_tokens(self) -> float:
        """Share of the rows in blocks in use that no token fills."""
        return 1 - self.held.tokens / self.held.block_tokens

    @property
    def waste_bytes(self) -> float:
        """1 - bytes of filled rows, in the form they have, over committed bytes, tables included."""
        return 1 - self.held.filled / self.held.committed

    @property
    def saved_vs_static(self) -> float:
        """1 - committed bytes over those of one static bf16 cache a running sequence.

        Without blocks that nobody uses any more: a static cache keeps none, and they leave as soon as room is needed.
        """
        return 1 - (self.held.committed - self.held.cached) / self.held.static

    @property
    def saved_vs_static_with_cached(self) -> float:
        """The same with those blocks, which stay for reuse up to half of the limit."""
        return 1 - self.held.committed / self.held.static

    @property
    def growth_per_1k_tokens(self) -> float:
        return 1000 * self.growth_events / self.computed_tokens

    @property
    def calls_per_1k_tokens(self) -> float:
        """Commits and decommits: what the operating system is asked."""
        return 1000 * self.system_calls / self.computed_tokens

    @property
    def moved_per_token(self) -> float:
        """Bytes that the defragmenter copied, for every token computed."""
        return self.moved_bytes / self.computed_tokens

    @property
    def fragmentation(self) -> float:
        """Mean over time of the worst pool's: 1 - longest stretch of unused extents / all unused ones."""
        return self.held.fragmentation / self.held.seconds


@dataclass
class _Running:
    """A sequence of the trace. `computed` tokens are published; the prompt is read, then one token a step follows."""

    index: int
    request: TraceRequest
    table: BlockTable
    pending: int = 0

    @property
    def computed(self) -> int:
        return self.table.num_tokens

    @property
    def is_reading(self) -> bool:
        return self.computed < self.request.prompt_tokens

    @property
    def is_done(self) -> bool:
        return self.computed >= self.request.total_tokens

    def next_tokens(self, budget: int) -> int:
        return min(self.request.prompt_tokens - self.computed, budget) if self.is_reading else 1

    def token_ids(self) -> list[int]:
        """Ids of the pending tokens: a different text for every request."""
        start, step = self.computed, 7919 * (self.index + 1)
        return [(step + p * p + 104_729 * p) % _VOCABULARY for p in range(start, start + self.pending)]


class TraceReplay:
    """One cache, one trace. `run` once."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        static_tokens: int,
        config: CacheConfig,
        engine: EngineConfig | None = None,
    ) -> None:
        self.now = 0.0
        self.cache = KVCache(smollm2(static_tokens), config, clock=lambda: self.now)
        self.figures = ReplayFigures(len(requests), static_tokens)
        self._engine = engine or EngineConfig()
        self._waiting = deque(enumerate(requests))
        self._running: list[_Running] = []
        self._budget = 0
        self._moved_bytes = 0  # at the last look
        self._last: tuple[list[int], KVBatch] | None = None  # names of the last step's sequences, and its tables
        self._group = self.cache.geometry.groups[0]
        self._block_tokens = config.block_tokens
        self._static_bytes = static_tokens * token_bytes(self._group, Form.BF16)

    def run(self) -> ReplayFigures:
        """Replay to the end. Side effect: the cache is closed."""
        while self._waiting or self._running:
            if not self._running:
                self._idle_until(self._waiting[0][1].arrival_s)
            self._step()
        stats = self.cache.stats()
        self.figures.growth_events = stats.growth_events
        self.figures.computed_tokens = stats.computed_tokens
        self.figures.system_calls = stats.arena_calls["commit"] + stats.arena_calls["decommit"]
        self.figures.moved_bytes = stats.moved_bytes
        self.figures.peak_bytes = stats.peak_bytes
        assert stats.hit_tokens == 0, f"{stats.hit_tokens} tokens were reused between different texts"
        self.cache.check_integrity()
        self.cache.close()
        return self.figures

    def _idle_until(self, arrival_s: float) -> None:
        if arrival_s > self.now:
            self._measure(arrival_s - self.now)
            self.now = arrival_s
            self.cache.maintain()

    def _step(self) -> None:
        before, preemptions = self._places_of_last_step(), self.figures.num_preemptions
        self._grow_running()
        self._admit()
        stepping = [sequence for sequence in self._running if sequence.pending]
        assert stepping, "nothing runs although the memory is free: a request is larger than the limit"
        (batch,) = self.cache.prepare([(s.table, s.pending) for s in stepping])
        if before is not None and self.figures.num_preemptions == preemptions:  # else blocks have changed hands
            self._count_moved(before, batch)
        self._last = [s.index for s in stepping], batch
        for sequence in stepping:
            self.cache.publish(sequence.table, sequence.token_ids())
            sequence.pending = 0
        self.now += STEP_S
        if self.figures.num_steps % STEPS_PER_SAMPLE == 0:
            self._measure(STEP_S * STEPS_PER_SAMPLE)
        self._finish()

    def _grow_running(self) -> None:
        """Room for the step of every running sequence: decodes first; the newest goes when there is none."""
        self._budget = self._engine.max_step_tokens
        for sequence in sorted(self._running, key=lambda s: s.is_reading):
            if sequence not in self._running or self._budget == 0:
                continue
            wanted = sequence.next_tokens(self._budget)
            while not self.cache.allocate(sequence.table, wanted):
                newest = self._running[-1]
                self._preempt(newest)
                if newest is sequence:
                    break
            else:
                sequence.pending = wanted
                self._budget -= wanted

    def _preempt(self, sequence: _Running) -> None:
        self._budget += sequence.pending
        self._running.remove(sequence)
        self.cache.release(sequence.table)
        self._waiting.appendleft((sequence.index, sequence.request))
        self.figures.num_preemptions += 1

    def _admit(self) -> None:
        while (
            self._waiting
            and self._waiting[0][1].arrival_s <= self.now
            and len(self._running) < self._engine.max_num_sequences
            and self._budget > 0
        ):
            index, request = self._waiting[0]
            sequence = _Running(index, request, self.cache.new_table())
            wanted = sequence.next_tokens(self._budget)
            if not self.cache.allocate(sequence.table, wanted):
                return
            sequence.pending = wanted
            self._budget -= wanted
            self._waiting.popleft()
            self._running.append(sequence)

    def _finish(self) -> None:
        done = [sequence for sequence in self._running if sequence.is_done]
        for sequence in done:
            self._running.remove(sequence)
            self.cache.release(sequence.table)
        self.cache.maintain(len(done))
        self.figures.num_steps += 1

    def _measure(self, seconds: float) -> None:
        """Add what is held now, for `seconds`."""
        stats, held, size = self.cache.stats(), self.figures.held, self._block_tokens
        lengths = [sequence.computed for sequence in self._running]
        filling = sum(length % size for length in lengths)
        sealed = sum(lengths) - filling + stats.num_cached_blocks * size
        filled = sealed * token_bytes(self._group, Form.INT8) + filling * token_bytes(self._group, Form.BF16)
        static = len(lengths) * self._static_bytes
        self.figures.longest_copy_bytes = max(self.figures.longest_copy_bytes, stats.moved_bytes - self._moved_bytes)
        self._moved_bytes = stats.moved_bytes
        held.committed += stats.held_bytes * seconds
        held.cached += stats.cached_bytes * seconds
        held.filled += filled * seconds
        held.static += static * seconds
        held.tokens += sum(lengths) * seconds
        held.block_tokens += sum(round_up(length, size) for length in lengths) * seconds
        held.fragmentation += stats.fragmentation_ratio * seconds
        held.seconds += seconds
        self.figures.peak_static_bytes = max(self.figures.peak_static_bytes, static)

    def _places_of_last_step(self) -> _Places | None:
        """Where the blocks of the sequences that go on lie, as the tables of the last step say now."""
        if self._last is None:
            return None
        names, batch = self._last
        goes_on = {sequence.index for sequence in self._running}
        kept = np.repeat([name in goes_on for name in names], np.diff(batch.entry_starts.numpy()))
        blocks = torch.from_numpy(batch.entries.numpy()[kept, 0].astype(np.int64))
        return blocks, _places(batch, blocks)

    def _count_moved(self, before: _Places, batch: KVBatch) -> None:
        """Tokens of blocks that were somewhere else before room was made: copies that growth would have cost."""
        blocks, was = before
        now = _places(batch, blocks)
        moved = ((was != 0) & (now != 0) & (was != now)).any(dim=1)
        self.figures.tokens_copied_by_growth += int(moved.sum()) * self._block_tokens


_Places = tuple[torch.Tensor, torch.Tensor]  # block ids [B], addresses [B, 2]


def _places(batch: KVBatch, blocks: torch.Tensor) -> torch.Tensor:
    """Pages of the first layer, sealed and as computed [B, 2]."""
    return torch.stack([batch.page_table[blocks, 0], batch.open_table[blocks, 0]], 1)
