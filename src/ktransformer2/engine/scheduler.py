"""Who computes what in the next step: decodes first, then prompts in chunks, in order of arrival. Knows no model.

Continuous batching (Orca, OSDI 2022, section 3) with chunked prefill (Sarathi-Serve, OSDI 2024, section 4).
When the cache has no room the newest running sequence is preempted: its table goes, its tokens stay, and it waits at
its old place; its blocks stay cached, so that a prefix hit brings it back. Nothing overtakes the head of the queue, but
for a sequence whose blocks are on their way up from a tier: others pass it while it waits for them, which has an end.

Invariants: `running` and `waiting` are ordered by arrival and disjoint; a sequence has a table exactly while it runs;
the oldest sequence that waits for no tier advances, or it is handed back as starved, so every queue drains.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import EngineConfig
from ktransformer2.engine.sequence import Sequence

# So many of those who wait have their blocks brought up, as far as memory holds them all beside what runs: more would
# only drive out each other's.
_FETCH_AHEAD = 8
# Steps, each some 10 ms of waiting, after which what a hanging tier holds counts as memory that nobody gives back.
_MOST_STARVING = 3000


class Work(NamedTuple):
    """What one sequence computes in a step: its next tokens. Room for them is allocated."""

    sequence: Sequence
    token_ids: list[int]
    is_decode: bool


@dataclass
class Step:
    """The plan of one step. `starved` are sequences that the memory cannot hold although nothing else runs.

    `waits_for_tiers`: somebody could go on, but for blocks, or room, that the tiers will give soon.
    """

    budget: int
    work: list[Work] = field(default_factory=list)
    starved: list[Sequence] = field(default_factory=list)
    num_preempted: int = 0
    waits_for_tiers: bool = False

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
        self._capacity_tokens = cache.capacity_tokens()
        self._num_starving = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def schedule(self) -> Step:
        """The next step. Side effects: room is allocated, sequences are admitted and preempted, blocks are fetched."""
        self._cache.receive()
        self._fetch_ahead()
        step = Step(self._max_step_tokens)
        decoding: list[Sequence] = []
        reading: list[Sequence] = []
        for sequence in self.running:
            (decoding if sequence.is_decoding else reading).append(sequence)
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
                self._starve(sequence, step)
                return
            self._preempt(newest, step)
            if newest is sequence:
                return
        self._num_starving = 0
        step.add(sequence, num_tokens)

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        if step.remove(sequence):
            assert sequence.table is not None, f"{sequence} has work but no table"
            self._cache.abandon(sequence.table)
        self.stop(sequence)
        self.add(sequence)
        sequence.request.num_preemptions += 1
        step.num_preempted += 1

    def _fetch_ahead(self) -> None:
        """Ask the tiers for what the next in the queue lack."""
        if not self.waiting:
            return
        room = self._capacity_tokens - sum(len(sequence.token_ids) for sequence in self.running)
        for sequence in self.waiting[:_FETCH_AHEAD]:
            room -= len(sequence.token_ids)
            if room < 0:
                return
            if sequence.asked_after is None:
                self._ask(sequence)

    def _ask(self, sequence: Sequence) -> None:
        sequence.asked_after = self._cache.num_evicted
        salt, chain = sequence.request.salt, sequence.block_hashes
        sequence.fetch = self._cache.fetch(sequence.token_ids, salt, chain, sequence.order)

    def _admit(self, step: Step) -> None:
        for sequence in list(self.waiting):
            if step.budget == 0 or len(self.running) == self._max_running:
                return
            if self._is_loading(sequence, passes=step.waits_for_tiers):
                step.waits_for_tiers = True
            elif self._start(sequence, step):
                self.waiting.remove(sequence)
            elif self.running:
                return  # it waits for room at the head of the queue
            elif not self._starve(sequence, step):
                return

    def _is_loading(self, sequence: Sequence, *, passes: bool) -> bool:
        """Whether blocks of a sequence whose turn has come are on their way. What came may have left again, or was not
        asked for: then the tiers are asked for what it lacks now. One that `passes` another does not take the room
        that this needs: it goes only if it was asked for and nothing has left since.
        """
        if sequence.fetch is not None and not sequence.fetch.has_come:
            return self._cache.is_loading(sequence.fetch)
        if sequence.asked_after == self._cache.num_evicted:
            return False
        if passes:
            return True
        self._end_fetch(sequence)
        self._ask(sequence)
        return sequence.fetch is not None and self._cache.is_loading(sequence.fetch)

    def _starve(self, sequence: Sequence, step: Step) -> bool:
        """No room although nothing else runs. False: copies on their way to and from tiers will give theirs back."""
        self._num_starving += 1
        if self._cache.staged_bytes and self._num_starving < _MOST_STARVING:
            step.waits_for_tiers = True
            return False
        self._num_starving = 0
        step.starved.append(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        return True

    def _start(self, sequence: Sequence, step: Step) -> bool:
        salt = sequence.request.salt
        match = self._cache.match(sequence.token_ids, salt, sequence.block_hashes)
        table = self._cache.new_table(salt)
        num_tokens = min(len(sequence.token_ids) - match.num_tokens, step.budget)
        if not self._cache.allocate(table, num_tokens, match):
            self._cache.release(table)
            return False
        sequence.table = table
        self._num_starving = 0
        self._end_fetch(sequence)
        if sequence.request.cached_tokens is None:
            sequence.request.cached_tokens = table.num_tokens
            sequence.request.restored_tokens = table.restored_tokens
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
        self._end_fetch(sequence)

    def _end_fetch(self, sequence: Sequence) -> None:
        """What it asked the tiers for has come, or is not wanted any more; it may ask again when it waits again."""
        if sequence.fetch is not None:
            self._cache.end_fetch(sequence.fetch)
        sequence.fetch = sequence.asked_after = None

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
