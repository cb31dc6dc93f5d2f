"""A request and its answers while they live. Knows what it holds and when it is done; knows no scheduler and no model.

    waiting -> running -> finished          table is None while waiting and when finished
       ^          |
       +----------+ preempted: the tokens stay, the table goes; a prefix hit brings most of it back

Invariants: `token_ids` is the prompt followed by the answer; the first `table.num_tokens` of them are in the cache.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from ktransformer2.engine.detokenizer import Detokenizer, Tokenizer
from ktransformer2.engine.outputs import Completion, FinishReason, RequestOutput, TokenLogprob, Usage
from ktransformer2.engine.sampler import SampledToken, SamplingState
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import KTransformerError

if TYPE_CHECKING:
    from ktransformer2.cache.block import BlockTable
    from ktransformer2.cache.explain import Explanation
    from ktransformer2.cache.promotion import Fetch


class Sequence:
    """One answer of a request, from the first prompt token to the last new one."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.token_ids = list(request.prompt_ids)
        self.block_hashes: list[bytes] = []  # filled by KVCache.match, so that no block is hashed twice while it waits
        self.fetch: Fetch | None = None  # its blocks on their way up from a tier, while it waits
        self.asked_after: int | None = None  # how many blocks had been evicted when the tiers were asked; None: not yet
        self.table: BlockTable | None = None
        self.sampling = SamplingState(params, request.prompt_ids, index)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer = Detokenizer(tokenizer, request.prompt_ids, params.stop)
        self._logprobs: list[TokenLogprob] = []

    def __repr__(self) -> str:
        computed = self.table.num_tokens if self.table is not None else "-"
        return f"Sequence({self.request.request_id}/{self.index}, {computed} of {len(self.token_ids)} tokens)"

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the request that came first, then its answers in turn."""
        return self.request.number, self.index

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_computed(self) -> int:
        return 0 if self.table is None else self.table.num_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens that are known but not computed; the last of them gives the next token."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1 and self.num_new > 0

    def advance(self, sampled: SampledToken, end_tokens: Set[int]) -> str:
        """Take the next token; the text that it settles. Side effect: `finish_reason` is set when it is the last."""
        params = self.request.params
        token = sampled.token_id
        self.token_ids.append(token)
        self.sampling.observe(token)
        if sampled.logprob is not None:
            self._logprobs.append(sampled.logprob)
        if token in params.stop_token_ids or (token in end_tokens and not params.ignore_eos):
            return self.finish("stop", token)
        text = self._detokenizer.push(token)
        if self._detokenizer.stop_string is not None:
            return text + self.finish("stop")
        if self.num_new == params.max_new_tokens:
            return text + self.finish("length")
        return text

    def finish(self, reason: FinishReason, stop_token: int | None = None) -> str:
        """No token follows; the text that was held back, which may turn out to end at a stop string."""
        text = self._detokenizer.flush()
        stop_string = self._detokenizer.stop_string
        self.stop_reason = stop_string if stop_string is not None else stop_token
        self.finish_reason = "stop" if stop_string is not None and reason == "length" else reason
        return text

    def completion(self) -> Completion:
        assert self.finish_reason is not None, f"{self} is not finished"
        return Completion(
            self.index,
            self._detokenizer.text,
            tuple(self.token_ids[len(self.request.prompt_ids) :]),
            None if self.request.params.logprobs is None else tuple(self._logprobs),
            self.finish_reason,
            self.stop_reason,
        )


class Request:
    """A prompt, how it is to be answered, and its `params.n` answers."""

    def __init__(self, request_id: str, number: int, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        """`number` is its place in the order of arrival; `params` has `max_new_tokens` named."""
        self.request_id = request_id
        self.number = number
        self.prompt_ids = prompt_ids
        self.params = params
        self.salt = b""
        self.arrived_s = 0.0
        self.first_token_s: float | None = None
        self.cached_tokens: int | None = None
        self.restored_tokens: dict[str, int] = {}
        self.miss: Explanation | None = None
        self.num_preemptions = 0
        self.error: KTransformerError | None = None
        self.sequences: list[Sequence] = []

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def heirs(self, sequence: Sequence) -> list[Sequence]:
        """The other answers, when this one has just read the prompt for all of them."""
        return self.sequences[1:] if sequence.index == 0 and sequence.num_new == 0 else []

    def output(self) -> RequestOutput:
        usage = Usage(
            len(self.prompt_ids),
            self.cached_tokens or 0,
            sum(sequence.num_new for sequence in self.sequences),
            None if self.first_token_s is None else self.first_token_s - self.arrived_s,
            self.num_preemptions,
            self.miss,
            dict(self.restored_tokens),
        )
        return RequestOutput(self.request_id, tuple(s.completion() for s in self.sequences), usage, self.error)
