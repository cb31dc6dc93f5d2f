"""Which requests are taken, and what is said to those that are not. Numbers in the message; nothing is ever truncated.

Knows no queue. Side effects: none.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

from ktransformer2.config import EngineConfig, format_bytes
from ktransformer2.engine.detokenizer import Vocabulary
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import ContextLengthError, EmptyPromptError, OutOfMemoryError, RequestError

if TYPE_CHECKING:
    from ktransformer2.cache.kv_cache import KVCache
    from ktransformer2.engine.sequence import Sequence
    from ktransformer2.models.batch import CausalModel


class Admission:
    """The border of an engine: a request that passes can be served to its end."""

    def __init__(self, model: CausalModel, cache: KVCache, vocabulary: Vocabulary, config: EngineConfig) -> None:
        self._vocab_size = model.vocab_size
        self._max_positions = model.geometry.max_positions
        self._shift_refused = model.geometry.shift_refused
        self._cache, self._vocabulary, self._config = cache, vocabulary, config

    def check(self, prompt_ids: abc.Sequence[int], params: SamplingParams) -> SamplingParams:
        """The parameters with `max_new_tokens` named.

        Raises: EmptyPromptError, RequestError, ContextLengthError, OutOfMemoryError, in this order of looking.
        """
        params = params.with_reserve(self._config.max_new_tokens)
        if not prompt_ids:
            raise EmptyPromptError("the prompt is empty; it must hold at least one token")
        self._check_tokens(prompt_ids, params)
        reserve = params.max_new_tokens or 0
        self._check_context(len(prompt_ids), reserve)
        self._check_memory(len(prompt_ids), reserve)
        return params

    def _check_tokens(self, prompt_ids: abc.Sequence[int], params: SamplingParams) -> None:
        if not all(isinstance(token, int) for token in prompt_ids):
            raise RequestError("a prompt is a text or a list of whole numbers, the token ids; this list holds others")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab_size:
            wrong = next(token for token in prompt_ids if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"token id {wrong} at place {list(prompt_ids).index(wrong)} of the prompt is not in the model's "
                f"vocabulary; allowed: 0 to {self._vocab_size - 1}"
            )
        for token in params.logit_bias:
            if token >= self._vocab_size:
                raise RequestError(f"logit_bias names token {token}; allowed: 0 to {self._vocab_size - 1}")
        if params.stop and self._vocabulary.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")

    def _check_context(self, prompt: int, reserve: int) -> None:
        if prompt + reserve <= self._max_positions:
            return
        longest = self._max_positions - reserve
        advice = f"the longest prompt with this reserve is {longest} tokens" if longest > 0 else "lower max_new_tokens"
        fixed = f", and its positions cannot be moved ({self._shift_refused})" if self._shift_refused else ""
        raise ContextLengthError(
            f"a prompt of {prompt} tokens and a reserve of {reserve} for the answer (max_new_tokens) are "
            f"{prompt + reserve} tokens; the model's maximum is {self._max_positions}{fixed}. "
            f"Nothing was truncated: {advice}"
        )

    def _check_memory(self, prompt: int, reserve: int) -> None:
        limit, chunk = self._cache.config.memory_bytes, self._config.max_step_tokens
        need = self._cache.bytes_for(prompt + reserve, chunk)
        if need <= limit:
            return
        capacity = self._cache.capacity_tokens(chunk)
        left = capacity - reserve
        longest = f"The longest prompt that fits with this reserve is {left} tokens. " if left > 0 else ""
        raise OutOfMemoryError(
            f"a prompt of {prompt} tokens and a reserve of {reserve} for the answer need {prompt + reserve} tokens in "
            f"the cache, which are {format_bytes(need)}; the memory limit of {format_bytes(limit)} holds {capacity}. "
            f"{longest}{self._advice()}"
        )

    def starved(self, sequence: Sequence) -> OutOfMemoryError:
        """What to say when a request that should fit found no room although nothing else runs."""
        stats = self._cache.stats()
        taken, limit = format_bytes(stats.committed_bytes), format_bytes(stats.limit_bytes)
        return OutOfMemoryError(
            f"no room for the {len(sequence.token_ids)} tokens of request {sequence.request.request_id}, although no "
            f"other request runs: {taken} of {limit} are taken by "
            f"block tables held outside the engine and by pins. Release them. {self._advice()}"
        )

    def _advice(self) -> str:
        int8 = "" if self._cache.config.kv != "full" else ", or hold keys and values in int8 (kv='int8')"
        return f"Raise memory=, lower max_new_tokens{int8}; `ktransformer plan` says beforehand what fits"
