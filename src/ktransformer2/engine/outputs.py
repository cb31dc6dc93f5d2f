"""What a request gives back: chunks while it runs, an output when it is done. Plain frozen data; knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ktransformer2.errors import KTransformerError

if TYPE_CHECKING:
    from ktransformer2.cache.explain import Explanation

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probabilities at one place of the answer. `top` is the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """One answer. `token_ids` holds every token chosen, an end token included; `text` ends before a stop string.

    `stop_reason` is the stop string or the end token that ended it; None for another reason.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Usage:
    """What a request cost: `cached_tokens` of `prompt_tokens` were in the cache; `new_tokens` is over all answers.

    `ttft_s` is from `add` to the first token, None when there was none. `miss` says why not more of the prompt was in
    the cache, without a look at other salts; None when it was never looked up. `restored_tokens` are those of the
    cached ones that the device did not have: they had been kept by a tier below it, by its name, and came up.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_s: float | None
    num_preemptions: int = 0
    miss: Explanation | None = None
    restored_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_restored(self) -> int:
        """Restored tokens, from all tiers."""
        return sum(self.restored_tokens.values())


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. The shorthands `text`, `token_ids`, ... are those of the first answer.

    A request that failed while it ran has `finish_reason == "error"` and `error`; other requests are not affected.
    """

    request_id: str
    completions: tuple[Completion, ...]
    usage: Usage
    error: KTransformerError | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.completions[0].stop_reason


@dataclass(frozen=True)
class StreamChunk:
    """News of one answer of one request.

    `text` is what is new and will not change any more; it may be empty while a character or a possible stop string
    is incomplete. `prefill` is (tokens processed, tokens in all) when a part of the prompt was read, else None, and
    `cached_tokens` how many of these came from the cache.
    `output` comes once, with the last chunk of the request.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prefill: tuple[int, int] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None


@dataclass
class EngineStats:
    """Counters since the engine began, and what it holds now. Token counts are exact; nothing is sampled."""

    num_waiting: int = 0
    num_running: int = 0
    num_steps: int = 0
    num_added: int = 0
    num_refused: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    last_step_tokens: int = 0
    last_step_s: float = 0.0
