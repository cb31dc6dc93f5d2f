"""JSON schemas as constraints on the next token. The one file that imports llguidance.

Compiling is bounded by llguidance's own fuel and happens in the tokenizer's thread, never in the engine's.
Invariant: an answer under a constraint can always go on, or be ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from ktransformer2.server.problems import ApiError

# Whitespace between tokens of JSON says nothing, and a small model may never stop writing it.
_OPTIONS: Any = {"whitespace_flexible": False}


class Grammar:
    """One answer's way through a schema: a `Constraint` of the sampler."""

    def __init__(self, matcher: LLMatcher, end_tokens: Iterable[int]) -> None:
        self._matcher, self._end_tokens = matcher, list(end_tokens)

    def allowed(self, vocab_size: int) -> torch.Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        named = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool))
        allowed = torch.zeros(
            vocab_size, dtype=torch.bool
        )  # [V]; a model may have more logits than the tokenizer has tokens
        allowed[: named.shape[0]] = named
        if self._matcher.is_stopped() or not bool(allowed.any()):
            allowed[self._end_tokens] = True
        return allowed

    def observe(self, token_id: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


class Grammars:
    """Compiles schemas for one tokenizer. Making it takes a second for a large vocabulary."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        """Raises: ApiError for a tokenizer that llguidance cannot read."""
        self._end_tokens = sorted(end_tokens)
        try:
            self._tokenizer: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=self._end_tokens)
        except ValueError as error:
            raise ApiError(
                400,
                f"this model's tokenizer takes no grammar ({error})",
                "unsupported_parameter",
                param="response_format",
            ) from error

    def json_schema(self, schema: Mapping[str, Any]) -> Callable[[], Grammar]:
        """What makes the constraint of each answer. Raises: ApiError for a schema that is none or too large."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
        except ValueError as error:
            raise _refused(str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return lambda: Grammar(matcher.deep_copy(), self._end_tokens)


def _refused(why: str) -> ApiError:
    return ApiError(400, f"the JSON schema is not taken: {why[:300]}", "invalid_json_schema", param="response_format")
