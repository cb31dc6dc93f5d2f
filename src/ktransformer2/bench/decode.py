"""Decoding behind a long prompt on one model: the engine with its shipped defaults beside transformers and its caches.

The time to the first token is taken from prefills of an empty cache. Ratios are the rival's time over ours: above 1 we
are faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

from ktransformer2.bench.contest import (
    BEST_WAYS,
    TOKENS_PER_ROUND,
    WAYS,
    Rival,
    Seconds,
    decode_rounds,
    faster_of,
    kv_share,
    rivals,
    row_of,
)
from ktransformer2.bench.corpus import text_of
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.rounds import ratio
from ktransformer2.bench.subject import load_subject
from ktransformer2.engine.llm import LLM
from ktransformer2.engine.outputs import StreamChunk
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.loading import LoadedModel

FULL_TOKENS, QUICK_TOKENS = 8_000, 500
FULL_ROUNDS, QUICK_ROUNDS = 12, 3
_PREFILLS = 3


class _Ours:
    """One stream of the engine, read token by token."""

    name = "ours"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._stream: Iterator[StreamChunk] = iter(())

    def prefill(self, prompt: Sequence[int], max_new_tokens: int) -> float:
        """Seconds to the first token. The cache holds nothing before."""
        self.llm.cache.clear()
        begin = time.perf_counter()
        self._stream = self.llm.stream(list(prompt), SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))
        self._next_token()
        return time.perf_counter() - begin

    def decode(self, num_tokens: int) -> list[float]:
        seconds = []
        for _ in range(num_tokens):
            begin = time.perf_counter()
            self._next_token()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def finish(self) -> None:
        """Read what is left, so that the request's blocks are released."""
        for _ in self._stream:
            pass

    def _next_token(self) -> None:
        while not next(self._stream).token_ids:
            pass


def run(options: BenchOptions) -> Outcome:
    """Decode, time to first token, and bytes held, against transformers."""
    dtype = options.dtype or "bf16"
    rounds = QUICK_ROUNDS if options.quick else FULL_ROUNDS
    loaded = load_subject(options, dtype)
    prompt = long_prompt(loaded, options)
    with LLM(loaded) as llm:
        ours = _Ours(llm)
        first = _first_tokens(ours, loaded, prompt, 1 if options.quick else _PREFILLS)
        others, seconds_to_first = rivals(loaded, prompt, rounds)
        for way, value in seconds_to_first.items():
            first[way].append(value)
        ours.prefill(prompt, rounds * TOKENS_PER_ROUND + 16)
        seconds = decode_rounds({"ours": ours, **others}, rounds)
        num_tokens = len(prompt) + 1 + (rounds + 1) * TOKENS_PER_ROUND
        bytes_share = kv_share(llm.cache.stats(), loaded.model.geometry, num_tokens)
        ours.finish()
        config = {"cache": llm.cache.config.kv, "memory_bytes": llm.cache.config.memory_bytes}
    best, best_first = faster_of(BEST_WAYS, seconds), faster_of(WAYS, first)
    summary = {
        "decode_vs_hf_best_8k": ratio(seconds[best], seconds["ours"]).median,
        "decode_vs_hf_stock_8k": ratio(seconds["stock"], seconds["ours"]).median,
        "ttft_vs_hf_8k": median(first[best_first]) / median(first["ours"]),
        "kv_bytes_vs_fp16": bytes_share,
    }
    rows = [
        row_of(name, "ours", len(prompt), seconds)
        | {"first_token_s": median(first[name]), "prefills": len(first[name])}
        for name in ("ours", *WAYS)
    ]
    scenario = {"dtype": dtype, "model": loaded.source, "prompt_tokens": len(prompt), "rounds": rounds, **config}
    return Outcome(rows, summary, scenario | {"best_way": best, "best_first_way": best_first})


def long_prompt(loaded: LoadedModel, options: BenchOptions) -> list[int]:
    """The beginning of the English text."""
    num_tokens = options.max_tokens or (QUICK_TOKENS if options.quick else FULL_TOKENS)
    prompt: list[int] = loaded.tokenizer.encode(text_of("english"))[:num_tokens]
    assert len(prompt) == num_tokens, f"the text holds {len(prompt)} tokens, {num_tokens} are asked for"
    return prompt


def _first_tokens(ours: _Ours, loaded: LoadedModel, prompt: Sequence[int], repeats: int) -> Seconds:
    """Seconds to the first token of ours and of stock transformers, in turns."""
    seconds: Seconds = {"ours": [], **{way: [] for way in WAYS}}
    for i in range(repeats):
        say(f"time to the first token behind {len(prompt):,} tokens, {i + 1} of {repeats}")
        seconds["ours"].append(ours.prefill(prompt, 1))
        ours.finish()
        seconds["stock"].append(Rival(loaded, "stock", 0).prefill(prompt))
    return seconds
