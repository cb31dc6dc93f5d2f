"""What clients get: usage, log probabilities, reasons, in OpenAI's words. Pure but for one decoding; knows no route.

`cached_tokens` is what the engine counted when it adopted a prefix: exactly the prompt tokens that it did not compute.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ktransformer2 import __version__
from ktransformer2.engine.outputs import FinishReason, RequestOutput, StreamChunk, TokenLogprob, Usage
from ktransformer2.server.facts import Facts

FINGERPRINT = f"ktransformer2-{__version__}"
Piece = Callable[[int], str]


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every completion object, or all chunks of one, begin with."""
    named = {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}
    return named | {"system_fingerprint": FINGERPRINT}


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    usages = [output.usage for output in outputs]
    prompt, new = sum(u.prompt_tokens for u in usages), sum(u.new_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
    }


def extra_of(outputs: Sequence[RequestOutput], facts: Facts, notes: dict[str, Any]) -> dict[str, Any]:
    """What is said beyond OpenAI's fields: where the cached tokens lay, and why there were not more.

    Nothing here truncates a prompt and only whole prefixes are reused, so both are told as constants.
    """
    usages = [output.usage for output in outputs]
    return {
        "cached_by_tier": cached_by_tier(usages),
        "truncated": False,
        "approximate": False,
        "kv": facts.kv_form,
        "ttft_ms": [None if u.ttft_s is None else round(1000 * u.ttft_s, 1) for u in usages],
        "miss": [None if u.miss is None else u.miss.reason for u in usages],
        **notes,
    }


def cached_by_tier(usages: Sequence[Usage]) -> dict[str, int]:
    """`memory`: tokens that were on the device; the others came up from the tier of that name."""
    tiers = {"memory": sum(u.cached_tokens - u.num_restored for u in usages)}
    for usage in usages:
        for tier, num_tokens in usage.restored_tokens.items():
            tiers[tier] = tiers.get(tier, 0) + num_tokens
    return tiers


def progress_of(chunk: StreamChunk, began_s: float, now_s: float) -> dict[str, Any]:
    """llama.cpp's `prompt_progress`."""
    assert chunk.prefill is not None, "no progress"
    processed, total = chunk.prefill
    elapsed = round(1000 * (now_s - began_s))
    return {"total": total, "cache": chunk.cached_tokens, "processed": processed, "time_ms": elapsed}


def reason_of(reason: FinishReason | None) -> str | None:
    """OpenAI knows no cancelled answer: the one that the server ended has what it has."""
    return "stop" if reason == "cancelled" else reason


def chat_logprobs(logprobs: Sequence[TokenLogprob] | None, piece: Piece) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    content = [
        _named(place.token_id, place.logprob, piece)
        | {"top_logprobs": [_named(token, logprob, piece) for token, logprob in place.top]}
        for place in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Sequence[TokenLogprob] | None, piece: Piece, offset: int) -> dict[str, Any] | None:
    """`offset`: characters of the answer's pieces before these."""
    if logprobs is None:
        return None
    pieces = [piece(place.token_id) for place in logprobs]
    return {
        "tokens": pieces,
        "token_logprobs": [_finite(place.logprob) for place in logprobs],
        "top_logprobs": [{piece(token): _finite(logprob) for token, logprob in place.top} for place in logprobs],
        "text_offset": list(accumulate(map(len, pieces[:-1]), initial=offset)) if pieces else [],
    }


def _named(token_id: int, logprob: float, piece: Piece) -> dict[str, Any]:
    """A token that is part of a character has no bytes of its own here."""
    text = piece(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def _finite(logprob: float) -> float:
    """JSON has no infinity: a token that the model forbids is as unlikely as OpenAI says it."""
    return max(logprob, -9999.0)
