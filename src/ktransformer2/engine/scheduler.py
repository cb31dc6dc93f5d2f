"""Who computes what in the next step: decodes first, then prompts in chunks, in order of arrival. Knows no model.

Continuous batching (Orca, OSDI 2022, section 3) with chunked prefill (Sarathi-Serve, OSDI 2024, section 4).
When the cache has no room the newest running sequence is preempted: its table goes, its tokens stay, and it waits at
its old place; its blocks stay cached, so that a prefix hit brings it back. Nothing overtakes the head of the queue.

Invariants: `running` and `waiting` are ordered by arrival and disjoint; a sequence has a table exactly while it runs;
the oldest sequence always advances, or it is handed back as starved, so every queue drains.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import EngineConfig
from ktransformer2.engine.sequence import Sequence


@dataclass(frozen=True)
class Work:
    """What one sequence computes in a step: its next tokens. Room for them is allocated."""

    sequence: Sequence
    token_ids: list[int]
    is_decode: bool


@dataclass
class Step:
    """The plan of one step. `starved` are sequences that the memory cannot hold although nothing else runs."""

    budget: int
    work: list[Work] = field(default_factory=list)
    starved: list[Sequence] = field(default_factory=list)
    num_preempted: int = 0

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        self.work.append(Work(sequence, sequence.token_ids[start : start + num_tokens], sequence.is_decoding))
        self.budget -= num_tokens

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence's work out of the plan; False: it had none."""
        for place, work in enumerate(self.work):
            if work.sequence is sequence:
                self.budget += len(work.token_ids)
                del self.work[place]
                return True
        return False

    @property
    def num_tokens(self) -> int:
        return sum(len(work.token_ids) for work in self.work)


class Scheduler:
    """The queues of one engine. All room is asked of `KVCache`, which says no by returning False."""

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self._cache = cache
        self._max_step_tokens = config.max_step_tokens
        # Every running sequence decodes in every step.
        self._max_running = min(config.max_num_sequences, config.max_step_tokens)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def schedule(self) -> Step:
        """The next step. Side effects: room is allocated, sequences are admitted and preempted."""
        step = Step(self._max_step_tokens)
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        reading = [sequence for sequence in self.running if not sequence.is_decoding]
        for sequence in decoding + reading:
            self._grow(sequence, step)
        if step.num_preempted == 0:  # else what was just freed would be taken by those who had to give it
            self._admit(step)
        return step

    def _grow(self, sequence: Sequence, step: Step) -> None:
        if (
            sequence.table is None or step.budget == 0
        ):  # preempted for an older one in this step, or its turn is the next
            return
        num_tokens = min(sequence.num_remaining, step.budget)
        while not self._cache.allocate(sequence.table, num_tokens):
            newest = self.running[-1]
            if newest is sequence and len(self.running) == 1:
                step.starved.append(sequence)
                return
            self._preempt(newest, step)
            if newest is sequence:
                return
        step.add(sequence, num_tokens)

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        if step.remove(sequence):
            assert sequence.table is not None, f"{sequence} has work but no table"
            self._cache.abandon(sequence.table)
        self.stop(sequence)
        self.add(sequence)
        sequence.request.num_preemptions += 1
        step.num_preempted += 1

    def _admit(self, step: Step) -> None:
        while self.waiting and step.budget > 0 and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            if self._start(sequence, step):
                del self.waiting[0]
            elif self.running:
                return  # it waits for room at the head of the queue
            else:
                step.starved.append(self.waiting.pop(0))

    def _start(self, sequence: Sequence, step: Step) -> bool:
        salt = sequence.request.salt
        match = self._cache.match(sequence.token_ids, salt, sequence.block_hashes)
        table = self._cache.new_table(salt)
        num_tokens = min(len(sequence.token_ids) - match.num_tokens, step.budget)
        if not self._cache.allocate(table, num_tokens, match):
            self._cache.release(table)
            return False
        sequence.table = table
        if sequence.request.cached_tokens is None:
            sequence.request.cached_tokens = table.num_tokens
            sequence.request.miss = self._cache.explain(sequence.token_ids, salt, match, across_salts=False)
        insort(self.running, sequence, key=lambda s: s.order)
        step.add(sequence, num_tokens)
        return True

    def branch(self, parent: Sequence, sequence: Sequence) -> None:
        """`sequence` goes on from what `parent` has computed: at once by a fork, or, without a place, by the queue."""
        assert parent.table is not None, f"{parent} has nothing to go on from"
        if len(self.running) < self._max_running:
            sequence.table = self._cache.fork(parent.table)
        if sequence.table is not None:
            insort(self.running, sequence, key=lambda s: s.order)
        else:
            self.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        """The sequence neither runs nor waits any more. Side effect: its blocks are released, and stay cached."""
        if sequence.table is not None:
            self.running.remove(sequence)
            self._cache.release(sequence.table)
            sequence.table = None
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def abandon(self) -> None:
        """The step was not computed: forget the room that was allocated for it. Sequences stay where they are."""
        for sequence in self.running:
            if sequence.table is not None:
                self._cache.abandon(sequence.table)

    def check_integrity(self) -> None:
        for queue in (self.running, self.waiting):
            order = [sequence.order for sequence in queue]
            assert order == sorted(set(order)), f"out of order: {order}"
            assert all(sequence.finish_reason is None for sequence in queue), f"finished, but queued: {queue}"
        assert all(sequence.table is not None for sequence in self.running), f"runs without a table: {self.running}"
        assert all(sequence.table is None for sequence in self.waiting), f"waits with a table: {self.waiting}"
        assert len(self.running) <= self._max_running, f"{len(self.running)} run, at most {self._max_running} may"
