"""Decoding behind a long prompt on one model: the engine with its shipped defaults beside transformers and its caches.

Rivals: StaticCache, and DynamicCache with an explicit mask (transformers at its best is the faster of the two), and
stock `generate`. All contenders hold the same prompt and decode a few tokens each in every round. The time to the first
token is taken from prefills of an empty cache. Ratios are the rival's time over ours: above 1 we are faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

from ktransformer2.bench.corpus import text_of
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.reference import HFDecoder
from ktransformer2.bench.rounds import ratio, spread
from ktransformer2.bench.shapes import token_bytes
from ktransformer2.bench.subject import load_subject
from ktransformer2.engine.llm import LLM
from ktransformer2.engine.outputs import StreamChunk
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.layout import Form
from ktransformer2.models.loading import LoadedModel

FULL_TOKENS, QUICK_TOKENS = 8_000, 500
_FULL_ROUNDS, _QUICK_ROUNDS = 12, 3
_TOKENS_PER_ROUND = 8
_PREFILLS = 3
_WAYS = ("static", "masked", "stock")
Seconds = dict[str, list[float]]


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
    num_tokens = options.max_tokens or (QUICK_TOKENS if options.quick else FULL_TOKENS)
    rounds = _QUICK_ROUNDS if options.quick else _FULL_ROUNDS
    loaded = load_subject(options, dtype)
    prompt = loaded.tokenizer.encode(text_of("english"))[:num_tokens]
    assert len(prompt) == num_tokens, f"the text holds {len(prompt)} tokens, {num_tokens} are asked for"
    with LLM(loaded) as llm:
        ours = _Ours(llm)
        first = _first_tokens(ours, loaded, prompt, 1 if options.quick else _PREFILLS)
        decoders = _prefilled(loaded, prompt, first, num_tokens + rounds * _TOKENS_PER_ROUND + 16)
        ours.prefill(prompt, rounds * _TOKENS_PER_ROUND + 16)
        seconds = _decode_rounds(ours, decoders, loaded, rounds)
        bytes_share = _bytes_share(llm, loaded, num_tokens + 1 + (rounds + 1) * _TOKENS_PER_ROUND)
        ours.finish()
        config = {"cache": llm.cache.config.kv, "memory_bytes": llm.cache.config.memory_bytes}
    best = min(("static", "masked"), key=lambda way: median(seconds[way]))
    best_first = min(_WAYS, key=lambda way: median(first[way]))
    summary = {
        "decode_vs_hf_best_8k": ratio(seconds[best], seconds["ours"]).median,
        "decode_vs_hf_stock_8k": ratio(seconds["stock"], seconds["ours"]).median,
        "ttft_vs_hf_8k": median(first[best_first]) / median(first["ours"]),
        "kv_bytes_vs_fp16": bytes_share,
    }
    rows = [_row(name, num_tokens, seconds, first) for name in ("ours", *_WAYS)]
    scenario = {"dtype": dtype, "model": loaded.source, "prompt_tokens": num_tokens, "rounds": rounds, **config}
    return Outcome(rows, summary, scenario | {"best_way": best, "best_first_way": best_first})


def _first_tokens(ours: _Ours, loaded: LoadedModel, prompt: Sequence[int], repeats: int) -> Seconds:
    """Seconds to the first token of ours and of stock transformers, in turns."""
    seconds: Seconds = {"ours": [], **{way: [] for way in _WAYS}}
    for i in range(repeats):
        say(f"time to the first token behind {len(prompt):,} tokens, {i + 1} of {repeats}")
        seconds["ours"].append(ours.prefill(prompt, 1))
        ours.finish()
        with loaded.model.original_attention() as model:
            seconds["stock"].append(HFDecoder(model, "stock", 0).prefill(prompt))
    return seconds


def _prefilled(loaded: LoadedModel, prompt: Sequence[int], first: Seconds, room: int) -> dict[str, HFDecoder]:
    """Every way to decode, with the prompt read; its seconds go to `first`."""
    decoders = {}
    with loaded.model.original_attention() as model:
        for way in _WAYS:
            say(f"prefill of transformers, {way}")
            decoders[way] = HFDecoder(model, way, room)
            first[way].append(decoders[way].prefill(prompt))
    return decoders


def _decode_rounds(ours: _Ours, decoders: dict[str, HFDecoder], loaded: LoadedModel, rounds: int) -> Seconds:
    """Median seconds a token, for every contender and round, after a round that is not counted."""
    seconds: Seconds = {"ours": [], **{way: [] for way in decoders}}
    for i in range(rounds + 1):
        say(f"decoding, round {i} of {rounds}")
        found = {"ours": median(ours.decode(_TOKENS_PER_ROUND))}
        with loaded.model.original_attention():
            for way in list(decoders)[:: 1 if i % 2 else -1]:
                found[way] = median(decoders[way].decode(_TOKENS_PER_ROUND))
        if i:
            for name, value in found.items():
                seconds[name].append(value)
    return seconds


def _bytes_share(llm: LLM, loaded: LoadedModel, num_tokens: int) -> float:
    """Bytes of all extents and tables that the sequence uses, its filling block included, over its bytes in fp16."""
    stats = llm.cache.stats()
    assert stats.num_cached_blocks == 0, f"{stats.num_cached_blocks} blocks belong to nobody"
    fp16 = num_tokens * sum(token_bytes(group, Form.FP16) for group in loaded.model.geometry.groups)
    return (stats.used_bytes + stats.table_bytes) / fp16


def _row(name: str, num_tokens: int, seconds: Seconds, first: Seconds) -> dict[str, object]:
    slower = ratio(seconds[name], seconds["ours"])
    return {
        "part": f"one sequence behind {num_tokens:,} tokens",
        "contender": name,
        **spread(seconds[name]).as_row("ms_per_token", 1000.0),
        **slower.as_row("times_ours"),
        "first_token_s": median(first[name]),
        "prefills": len(first[name]),
    }
