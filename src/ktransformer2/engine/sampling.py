"""What one request asks of the sampler and when its answer ends. Frozen and checked; knows no tensor and no model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktransformer2.errors import RequestError

if TYPE_CHECKING:
    from ktransformer2.engine.sampler import Constraint

MAX_COMPLETIONS = 128
MAX_LOGPROBS = 100
MAX_STOPS = 64
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
_MAX_SEED = 2**63


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The defaults are greedy, as `transformers.generate` has them.

    max_new_tokens      the answer's reserve and bound; None: `EngineConfig.max_new_tokens`
    temperature         0: always the most likely token; else logits are divided by it
    top_k               only the k most likely tokens; 0: all
    top_p               only the fewest tokens whose probabilities reach this sum; 1: all
    min_p               only tokens at least this likely relative to the most likely one; 0: all
    presence_penalty    taken once from the logit of every token the answer already holds (-2 to 2)
    frequency_penalty   taken from it once per occurrence in the answer (-2 to 2)
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt and answer; 1: off
    logit_bias          added to the logits of these tokens after the penalties, token id -> -100 to 100
    constraint          makes, for each answer, what says which tokens may come next, such as a grammar; None: all may
    seed                same seed, same answer, whatever else runs; None: a fresh one. Each of `n` answers has its own
    stop                the answer ends before the first of these strings (one string or several)
    stop_token_ids      the answer ends at one of these tokens; its text is left out
    ignore_eos          do not end at the model's own end tokens
    logprobs            log probabilities of the chosen token and of the k most likely, of the model's own distribution
                        (before penalties and temperature); None: none
    n                   answers to the same prompt, which is computed once

    Raises RequestError for a value out of range.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # a mapping has no hash
    constraint: Callable[[], Constraint] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        self._check_integers()
        self._check_reals()
        self._check_stops()
        self._check_biases()

    def _check_integers(self) -> None:
        if self.max_new_tokens is not None:
            self._integer("max_new_tokens", 1, math.inf)
        self._integer("top_k", 0, math.inf)
        self._integer("n", 1, MAX_COMPLETIONS)
        if self.seed is not None:
            self._integer("seed", 0, _MAX_SEED - 1)
        if self.logprobs is not None:
            self._integer("logprobs", 0, MAX_LOGPROBS)

    def _check_reals(self) -> None:
        self._real("temperature", 0.0, math.inf)
        self._real("top_p", 0.0, 1.0, lowest_allowed=False)
        self._real("min_p", 0.0, 1.0)
        self._real("presence_penalty", -2.0, 2.0)
        self._real("frequency_penalty", -2.0, 2.0)
        self._real("repetition_penalty", 0.0, math.inf, lowest_allowed=False)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(
                f"stop={self.stop!r} is not allowed; allowed: up to {MAX_STOPS} strings, none of them empty"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(
                f"stop_token_ids={len(self.stop_token_ids)} ids is not allowed; allowed: {MAX_STOP_TOKENS}"
            )
        if not all(_is_integer(token) and token >= 0 for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids={self.stop_token_ids!r} is not allowed; allowed: token ids, 0 or more")

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias names {len(self.logit_bias)} tokens; allowed: {MAX_BIASES}")
        for token, bias in self.logit_bias.items():
            if not (_is_integer(token) and token >= 0 and isinstance(bias, int | float) and -100 <= bias <= 100):
                raise RequestError(
                    f"logit_bias[{token!r}]={bias!r} is not allowed; allowed: a token id, 0 or more, to -100 to 100"
                )

    def _integer(self, name: str, lowest: int, highest: float) -> None:
        value = getattr(self, name)
        if not (_is_integer(value) and lowest <= value <= highest):
            bound = f"{lowest} or more" if highest == math.inf else f"{lowest} to {highest}"
            raise RequestError(f"{name}={value!r} is not allowed; allowed: a whole number, {bound}")

    def _real(self, name: str, lowest: float, highest: float, *, lowest_allowed: bool = True) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (number and lowest <= value <= highest and (lowest_allowed or value > lowest)):
            start = f"{lowest:g}" if lowest_allowed else f"above {lowest:g}"
            bound = f"{start} or more" if highest == math.inf and lowest_allowed else start
            bound = bound if highest == math.inf else f"{start} to {highest:g}"
            raise RequestError(f"{name}={value!r} is not allowed; allowed: {bound}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        """Whether the next token is that of the largest logit as the model gave it."""
        return self.is_greedy and not (self.has_penalties or self.logit_bias or self.constraint)

    def with_reserve(self, default_max_new_tokens: int) -> SamplingParams:
        """The same with `max_new_tokens` named."""
        if self.max_new_tokens is not None:
            return self
        return dataclasses.replace(self, max_new_tokens=default_max_new_tokens)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise RequestError(f"{name}={value!r} is not allowed; allowed: a list")
    return tuple(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
