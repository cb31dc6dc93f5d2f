"""The engine: requests in, tokens out, one step at a time. `step()` is the path of a token, top to bottom.

    schedule  who computes what; room is allocated        Scheduler, KVCache.match and .allocate
              and what tiers have sent is taken in        KVCache.receive and .fetch
    prepare   tokens, positions, slots, block tables      KVCache.prepare
    forward   K and V are stored, attention reads pages   CausalModel.forward
    sample    the next token of whoever is up to date     sampler
    publish   rows are computed; full blocks are found    KVCache.publish
    maintain  a bounded share of upkeep                   KVCache.maintain

Knows no page and no weight. One thread owns it, the one that made it.
Invariant: whatever a step raises, no row stays allocated that was not computed, and no request is lost.
"""

from __future__ import annotations

import dataclasses
import time
from collections import abc

import torch

from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import EngineConfig
from ktransformer2.engine.admission import Admission
from ktransformer2.engine.detokenizer import Vocabulary
from ktransformer2.engine.outputs import EngineStats, RequestOutput, StreamChunk
from ktransformer2.engine.sampler import SampledToken, best_tokens, sample
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.engine.scheduler import Scheduler, Step, Work
from ktransformer2.engine.sequence import Request, Sequence
from ktransformer2.errors import (
    EngineClosedError,
    KTransformerError,
    NumericsError,
    QueueFullError,
    RequestError,
)
from ktransformer2.models.batch import CausalModel, FlatBatch
from ktransformer2.ownership import Owner

# A step that has nothing to do but wait for a tier lasts at most so long: callers want to look in between.
_TIER_WAIT_S = 0.01


class Engine:
    """Serves requests by continuous batching on one model and one cache."""

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        vocabulary: Vocabulary | None = None,
        config: EngineConfig | None = None,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
        """The cache belongs to the caller, who closes it after the engine."""
        self.config = config or EngineConfig()
        self.vocabulary = vocabulary or Vocabulary()
        self._model, self._cache, self._clock = model, cache, clock
        self._admission = Admission(model, cache, self.vocabulary, self.config)
        self._scheduler = Scheduler(cache, self.config)
        self._requests: dict[str, Request] = {}
        self._stats = EngineStats()
        self._owner = Owner("the engine")
        self._owner.check()
        self._closed = False

    # --- requests

    def add(
        self,
        prompt_ids: abc.Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        salt: bytes = b"",
    ) -> str:
        """Queue a request; its id. Requests of different `salt` share no blocks.

        Raises: EmptyPromptError, ContextLengthError, OutOfMemoryError, RequestError, QueueFullError; nothing is queued.
        """
        self._check_usable()
        try:
            params = self._admission.check(prompt_ids, params or SamplingParams())
            self._check_queue(request_id)
        except KTransformerError:
            self._stats.num_refused += 1
            raise
        number = self._stats.num_added
        request = Request(request_id or f"request-{number}", number, tuple(prompt_ids), params)
        request.salt, request.arrived_s = salt, self._clock()
        request.sequences = [Sequence(request, index, self.vocabulary.tokenizer) for index in range(params.n)]
        self._requests[request.request_id] = request
        self._scheduler.add(request.sequences[0])
        self._stats.num_added += 1
        self._stats.prompt_tokens += len(prompt_ids)
        return request.request_id

    def check(self, prompt_ids: abc.Sequence[int], params: SamplingParams | None = None) -> SamplingParams:
        """Whether `add` would take the prompt, the queue aside; the parameters with their defaults named.

        Raises: as `add`. Side effects: none.
        """
        self._check_usable()
        return self._admission.check(prompt_ids, params or SamplingParams())

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request now; what it has so far. None: no such request, or it has ended. Its blocks stay cached."""
        self._check_usable()
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish("cancelled")
        self._stats.num_cancelled += 1
        return self._leave(request)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def has_queue_room(self) -> bool:
        """Whether `add` has a place for one more request."""
        return len(self._scheduler.waiting) < self.config.max_queued_requests

    # --- a step

    def step(self) -> list[StreamChunk]:
        """One step for everyone who runs; their news, in the order of the batch. Without work: nothing."""
        self._check_usable()
        began_s = self._clock()
        sampled: list[list[SampledToken] | None] = []
        try:
            step = self._scheduler.schedule()
            if step.work:
                batch = self._prepare(step)
                logits = self._model.forward(batch)  # [work, V]
                sampled = self._sample(step, logits)
            elif step.waits_for_tiers:
                self._cache.wait_for_tiers(_TIER_WAIT_S)
        except BaseException:  # an interrupt from the keyboard too
            self._scheduler.abandon()
            raise
        chunks = self._publish(step, sampled)
        self._cache.maintain(sum(chunk.output is not None for chunk in chunks))
        self._count(step, began_s)
        return chunks

    def _prepare(self, step: Step) -> FlatBatch:
        tables: list[tuple[BlockTable, int]] = []
        token_ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for work in step.work:
            table = work.sequence.table
            assert table is not None, f"{work.sequence} has work but no table"
            tables.append((table, len(work.token_ids)))
            token_ids += work.token_ids
            positions += range(table.next_position, table.next_position + len(work.token_ids))
            last_rows.append(len(token_ids) - 1)
        kv = self._cache.prepare(tables)
        return FlatBatch(torch.tensor(token_ids), torch.tensor(positions), kv, torch.tensor(last_rows))

    def _sample(self, step: Step, logits: torch.Tensor) -> list[list[SampledToken] | None]:
        """Per work: a token for every answer that goes on from it, none in the middle of a prompt; None: not finite.

        The last row of a chunk in the middle of a prompt has logits too: what is not finite must not be published.
        """
        sampled: list[list[SampledToken] | None] = []
        for row, (work, best) in enumerate(zip(step.work, best_tokens(logits), strict=True)):
            sequence = work.sequence
            if best is None:
                sampled.append(None)
            elif len(work.token_ids) < sequence.num_remaining:
                sampled.append([])
            else:
                going_on = (sequence, *sequence.request.heirs(sequence))
                sampled.append([sample(logits, row, best, each.sampling) for each in going_on])
        return sampled

    def _publish(self, step: Step, sampled: list[list[SampledToken] | None]) -> list[StreamChunk]:
        failed: dict[Request, KTransformerError] = {s.request: self._admission.starved(s) for s in step.starved}
        for work, tokens in zip(step.work, sampled, strict=True):
            if tokens is None:
                failed.setdefault(work.sequence.request, _not_finite(work))
        chunks = [self._fail(request, error) for request, error in failed.items()]
        for work, tokens in zip(step.work, sampled, strict=True):
            table = work.sequence.table
            if table is None or tokens is None:  # its request has failed in this step
                continue
            self._cache.publish(table, work.token_ids)
            if tokens:
                chunks += self._go_on(work.sequence, tokens)
            elif work.sequence.num_new == 0:  # a preempted answer that is read again is no news
                chunks.append(self._progress(work.sequence))
        return chunks

    def _go_on(self, sequence: Sequence, tokens: list[SampledToken]) -> list[StreamChunk]:
        """Give tokens to the sequence and to its heirs, which go on from its blocks."""
        request = sequence.request
        receivers = [sequence, *request.heirs(sequence)]
        prefill, cached_tokens = None, 0
        if request.first_token_s is None:
            prefill = (len(request.prompt_ids), len(request.prompt_ids))
            request.first_token_s = self._clock()
            cached_tokens = request.cached_tokens or 0
            self._stats.cached_tokens += cached_tokens
        chunks = []
        for each, token in zip(receivers, tokens, strict=True):
            text = each.advance(token, self.vocabulary.end_tokens)
            if each is not sequence and each.finish_reason is None:
                self._scheduler.branch(sequence, each)
            logprobs = () if token.logprob is None else (token.logprob,)
            news = (request.request_id, each.index, text, (token.token_id,), logprobs, prefill, cached_tokens)
            chunks.append(StreamChunk(*news, finish_reason=each.finish_reason))
        for each in receivers:
            if each.finish_reason is not None:
                self._scheduler.stop(each)
        if chunks[-1].finish_reason is not None and request.is_finished:
            self._stats.num_finished += 1
            chunks[-1] = dataclasses.replace(chunks[-1], output=self._leave(request))
        return chunks

    def _progress(self, sequence: Sequence) -> StreamChunk:
        request = sequence.request
        read = (sequence.num_computed, len(request.prompt_ids))
        return StreamChunk(request.request_id, prefill=read, cached_tokens=request.cached_tokens or 0)

    def _fail(self, request: Request, error: KTransformerError) -> StreamChunk:
        request.error = error
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish("error")
        self._stats.num_failed += 1
        return StreamChunk(request.request_id, finish_reason="error", output=self._leave(request))

    def _leave(self, request: Request) -> RequestOutput:
        """The request is done. Side effect: its blocks are released; rows of this step are forgotten first."""
        for sequence in request.sequences:
            if sequence.table is not None:
                self._cache.abandon(sequence.table)
            self._scheduler.stop(sequence)
        del self._requests[request.request_id]
        return request.output()

    # --- figures and the end

    def maintain(self) -> None:
        """Upkeep without a step, for the owner to call now and then while idle: `step` does it when there is work.

        Blocks that nobody used for `cached_idle_s` are freed, and their memory is given back to the system.
        """
        self._check_usable()
        self._cache.maintain()

    def _count(self, step: Step, began_s: float) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.num_preemptions += step.num_preempted
        for work in step.work:
            if work.is_decode:
                stats.decode_tokens += 1
            else:
                stats.prefill_tokens += len(work.token_ids)
        stats.last_step_tokens = step.num_tokens
        stats.last_step_s = self._clock() - began_s
        num_reading = sum(len(work.token_ids) for work in step.work if not work.is_decode)
        if 2 * num_reading > step.num_tokens:  # else it says more of decodes than of what a prompt costs
            self._cache.computed(num_reading, stats.last_step_s)

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        queues = self._scheduler
        return dataclasses.replace(self._stats, num_waiting=len(queues.waiting), num_running=len(queues.running))

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()
        queued = {sequence.request.request_id for sequence in self._scheduler.running + self._scheduler.waiting}
        assert queued == set(self._requests), f"queued {queued}, known {set(self._requests)}"

    def close(self) -> None:
        """Cancel what runs. A second call does nothing."""
        if self._closed:
            return
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._closed = True

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed; make a new one")
        self._owner.check()

    def _check_queue(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is taken by a request that still runs; choose another")
        if not self.has_queue_room:
            raise QueueFullError(
                f"{len(self._scheduler.waiting)} requests wait, max_queued_requests={self.config.max_queued_requests} "
                "are allowed; try again later, or raise it"
            )


def _not_finite(work: Work) -> NumericsError:
    sequence = work.sequence
    return NumericsError(
        f"the model gave NaN or infinite logits at token {sequence.num_computed + len(work.token_ids) - 1} of request "
        f"{sequence.request.request_id}; it was ended and this step's blocks were not kept. Other requests go on. "
        "Look at the model's weights, or load it with dtype='float32'"
    )
