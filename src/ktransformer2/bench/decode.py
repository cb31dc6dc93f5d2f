"""Decoding behind a long prompt on one model: the engine with its shipped defaults beside transformers and its caches.

Two parts: `first`, the time to the first token from an empty cache, and `decode`. Ratios are the rival's time over
ours: above 1 we are faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

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
from ktransformer2.bench.rounds import ratio, spread
from ktransformer2.bench.subject import load_subject
from ktransformer2.engine.llm import LLM
from ktransformer2.engine.outputs import StreamChunk
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.loading import LoadedModel

PARTS = ("first", "decode")
FULL_TOKENS, QUICK_TOKENS = 8_000, 500
FULL_ROUNDS, QUICK_ROUNDS = 12, 3
_PREFILLS = 3
Row = dict[str, object]
Result = tuple[list[Row], dict[str, float]]


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
    """The parts that are asked for, against transformers."""
    dtype = options.dtype or "bf16"
    loaded = load_subject(options, dtype)
    prompt = long_prompt(loaded, options)
    rows: list[Row] = []
    summary: dict[str, float] = {}
    with LLM(loaded) as llm:
        for name, part in (("first", _first), ("decode", _decode)):
            if options.wants(name):
                more_rows, more = part(_Ours(llm), loaded, prompt, options)
                rows += more_rows
                summary |= more
        config = {"cache": llm.cache.config.kv, "memory_bytes": llm.cache.config.memory_bytes}
    scenario = {"dtype": dtype, "model": loaded.source, "prompt_tokens": len(prompt), **config}
    return Outcome(rows, summary, scenario)


def long_prompt(loaded: LoadedModel, options: BenchOptions) -> list[int]:
    """The beginning of the English text."""
    num_tokens = options.max_tokens or (QUICK_TOKENS if options.quick else FULL_TOKENS)
    prompt: list[int] = loaded.tokenizer.encode(text_of("english"))[:num_tokens]
    assert len(prompt) == num_tokens, f"the text holds {len(prompt)} tokens, {num_tokens} are asked for"
    return prompt


def _first(ours: _Ours, loaded: LoadedModel, prompt: Sequence[int], options: BenchOptions) -> Result:
    """Seconds to the first token of ours, of stock transformers and of its static cache, in turns."""
    repeats = 1 if options.quick else _PREFILLS
    seconds: Seconds = {"ours": [], "stock": [], "static": []}
    for i in range(repeats):
        say(f"time to the first token behind {len(prompt):,} tokens, {i + 1} of {repeats}")
        seconds["ours"].append(ours.prefill(prompt, 1))
        ours.finish()
        for way in ("stock", "static"):
            seconds[way].append(Rival(loaded, way, len(prompt) + 1).prefill(prompt))
    best = faster_of(("stock", "static"), seconds)
    part = f"the first token behind {len(prompt):,} tokens"
    rows: list[Row] = [
        {"part": part, "contender": name, **spread(values).as_row("seconds")} for name, values in seconds.items()
    ]
    return rows, {"ttft_vs_hf_8k": ratio(seconds[best], seconds["ours"]).median}


def _decode(ours: _Ours, loaded: LoadedModel, prompt: Sequence[int], options: BenchOptions) -> Result:
    """Milliseconds a token behind the prompt, and the bytes that ours holds."""
    rounds = QUICK_ROUNDS if options.quick else FULL_ROUNDS
    say(f"ours reads {len(prompt):,} tokens")
    ours.prefill(prompt, rounds * TOKENS_PER_ROUND + 16)
    seconds = decode_rounds({"ours": ours, **rivals(loaded, prompt, rounds)}, rounds)
    num_tokens = len(prompt) + 1 + (rounds + 1) * TOKENS_PER_ROUND
    share = kv_share(ours.llm.cache.stats(), loaded.model.geometry, num_tokens)
    ours.finish()
    summary = {
        "decode_vs_hf_best_8k": ratio(seconds[faster_of(BEST_WAYS, seconds)], seconds["ours"]).median,
        "decode_vs_hf_stock_8k": ratio(seconds["stock"], seconds["ours"]).median,
        "kv_bytes_vs_fp16": share,
    }
    return [row_of(name, "ours", len(prompt), seconds) for name in ("ours", *WAYS)], summary
