"""The doors for transformers users: `DynamicKVCache` in `generate`, and `attach`, on one model beside transformers.

Decoding behind a long prompt, with the drop-in's shipped defaults, in the loop of `contest`: ours is timed inside
`generate`, as stock is. The time to the first token of an attached model, cold and behind a prefix that an earlier call
read. And answers in every way to generate beside those of `generate` with DynamicCache: equal in fp32, and in bf16 but
for near-ties, where the reference differs from itself under another attention.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from ktransformer2.bench.contest import (
    BEST_WAYS,
    WAYS,
    decode_rounds,
    faster_of,
    kv_share,
    rivals,
    row_of,
)
from ktransformer2.bench.corpus import Drawing, draw_prompts
from ktransformer2.bench.decode import FULL_ROUNDS, QUICK_ROUNDS, long_prompt
from ktransformer2.bench.fidelity import first_difference
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.reference import HFDecoder, answers, shallow
from ktransformer2.bench.rounds import ratio, spread
from ktransformer2.bench.subject import load_subject
from ktransformer2.integrations.attach import attach
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.models.loading import LoadedModel

PARTS = ("decode", "attach", "answers")
_CALLS = 3
_QUESTION_TOKENS = 16
_BATCH = 8
_FULL_ANSWER, _QUICK_ANSWER = 32, 6
_FULL_PROMPT, _QUICK_PROMPT = 400, 40
_HELPER_LAYERS = 8
_ANSWER_DTYPES = ("fp32", "bf16")
_A_DAY_S = 86_400.0  # in bf16 without units for it the second round may come later than text is kept by default
# What differs in both attentions of transformers' own is a near-tie.
_OTHER_ATTENTION = {"sdpa": "eager", "eager": "sdpa"}
Row = dict[str, object]
Result = tuple[list[Row], dict[str, float]]


def run(options: BenchOptions) -> Outcome:
    """The parts that are asked for. Without a `dtype` the first two run in bf16, and answers are compared in both."""
    dtype = options.dtype or "bf16"
    rows: list[Row] = []
    summary: dict[str, float] = {}
    scenario: dict[str, object] = {"dtype": dtype}
    if options.wants("decode") or options.wants("attach"):
        loaded = load_subject(options, dtype)
        prompt = long_prompt(loaded, options)
        scenario |= {"model": loaded.source, "prompt_tokens": len(prompt)}
        for name, part in (("decode", _decode), ("attach", _attach)):
            if options.wants(name):
                more_rows, more = part(loaded, prompt, options)
                rows += more_rows
                summary |= more
    for each in (options.dtype,) if options.dtype else _ANSWER_DTYPES:
        if options.wants("answers"):
            more_rows, more = _answers(load_subject(options, each), each, options)
            rows += more_rows
            summary |= more
    return Outcome(rows, summary, scenario)


# --- decoding


def _decode(loaded: LoadedModel, prompt: Sequence[int], options: BenchOptions) -> Result:
    model, rounds = loaded.model.model, QUICK_ROUNDS if options.quick else FULL_ROUNDS
    cache = DynamicKVCache(model.config)
    ours = HFDecoder(model, "stock", 0, cache)
    say("prefill of the drop-in")
    ours.prefill(prompt)
    seconds = decode_rounds({"dropin": ours, **rivals(loaded, prompt, rounds)}, rounds)
    assert cache.kv is not None, "the cache was used"
    share = kv_share(cache.kv.stats(), loaded.model.geometry, cache.get_seq_length())
    cache.reset()
    summary = {
        "dropin_decode_vs_hf_best_8k": ratio(seconds[faster_of(BEST_WAYS, seconds)], seconds["dropin"]).median,
        "dropin_decode_vs_hf_stock_8k": ratio(seconds["stock"], seconds["dropin"]).median,
        "dropin_kv_bytes_vs_fp16": share,
    }
    return [row_of(name, "dropin", len(prompt), seconds) for name in ("dropin", *WAYS)], summary


# --- the second call on the same prefix


def _attach(loaded: LoadedModel, prompt: Sequence[int], options: BenchOptions) -> Result:
    """Seconds of `generate(max_new_tokens=1)`; every call asks another question behind the same prefix."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    head, questions = prompt[: -(2 * _CALLS * _QUESTION_TOKENS)], prompt[-(2 * _CALLS * _QUESTION_TOKENS) :]
    with loaded.model.original_attention() as bare, attach(bare) as held:
        for call in range(2 * (1 if options.quick else _CALLS)):
            name = ("cold", "warm")[call % 2]
            if name == "cold":
                held.clear()
            say(f"the first token of an attached model, {name}")
            asked = [*head, *questions[call * _QUESTION_TOKENS : (call + 1) * _QUESTION_TOKENS]]
            begin = time.perf_counter()
            answers(bare, [asked], 1)
            seconds[name].append(time.perf_counter() - begin)
            missed = len(head) - held.usage.cached_tokens
            assert missed == len(head) if name == "cold" else missed < held.cache.config.block_tokens, held.usage
    speedup = median(seconds["cold"]) / median(seconds["warm"])
    part = f"attach, the first token behind {len(head):,} tokens"
    rows: list[Row] = [
        {"part": part, "call": name, **spread(values).as_row("seconds")} for name, values in seconds.items()
    ]
    return rows, {"attach_warm_speedup": speedup}


# --- answers


Batch = Sequence[Sequence[int]]
Answers = list[list[list[int]]]  # of every prompt of every batch
_DOORS = ("drop-in", "attached, cold", "attached, warm")


@dataclass(frozen=True)
class _Way:
    """A way to generate, and over which batches of the prompts that were drawn."""

    name: str
    batches: Sequence[Batch]
    settings: dict[str, Any]

    def answers(self, model: Any, num_new: int, make_cache: Callable[[], Any] = lambda: None) -> Answers:
        return [answers(model, batch, num_new, make_cache(), **self.settings) for batch in self.batches]


def _answers(loaded: LoadedModel, dtype: str, options: BenchOptions) -> Result:
    """Every way to generate, by the drop-in and by an attached model, cold and warm, beside DynamicCache."""
    num_new = _QUICK_ANSWER if options.quick else _FULL_ANSWER
    ways = _ways(loaded, options)
    found = _through_the_doors(loaded, ways, num_new)
    rows: list[Row] = []
    total: Counter[str] = Counter()
    for way in ways:
        say(f"the answers of transformers: {way.name}")
        for door in _DOORS:
            wrong, ties = _judged(loaded, way, found[way.name, door], num_new)
            counts = {"answers": sum(map(len, way.batches)), "mismatches": wrong, "near_ties": ties}
            total.update(counts)
            part = f"answers of {num_new} tokens in {dtype}, beside DynamicCache"
            rows.append({"part": part, "way": way.name, "door": door, **counts})
    summary = {f"dropin_mismatch_{dtype}": float(total["mismatches"])}
    if dtype == "bf16":
        summary["dropin_near_tie_share_bf16"] = total["near_ties"] / total["answers"]
    return rows, summary


def _ways(loaded: LoadedModel, options: BenchOptions) -> tuple[_Way, ...]:
    longest = options.max_tokens or (_QUICK_PROMPT if options.quick else _FULL_PROMPT)
    drawing = Drawing(options.num_prompts or _BATCH, longest, options.seed)
    prompts = [prompt.token_ids for prompt in draw_prompts(drawing, loaded.tokenizer.encode)]
    alone = [[prompt] for prompt in sorted(prompts, key=len, reverse=True)[: 1 if options.quick else None]]
    with loaded.model.original_attention() as bare:
        helper = shallow(bare, min(_HELPER_LAYERS, bare.config.num_hidden_layers))
    return (
        _Way("greedy", alone, {}),
        _Way("4 beams", alone, {"num_beams": 4}),
        _Way("assisted by another model", alone, {"assistant_model": helper}),
        _Way("assisted by the prompt", alone, {"prompt_lookup_num_tokens": 5}),
        _Way("sampling", alone, {"do_sample": True, "top_p": 0.9}),
        _Way(f"batch of {len(prompts)}, padded", [prompts], {}),
    )


def _through_the_doors(loaded: LoadedModel, ways: Sequence[_Way], num_new: int) -> dict[tuple[str, str], Answers]:
    """By way and door."""
    model = loaded.model.model
    found = {}
    for way in ways:
        say(f"the answers of the drop-in: {way.name}")
        found[way.name, "drop-in"] = way.answers(model, num_new, lambda: DynamicKVCache(model.config, kv="full"))
    with loaded.model.original_attention() as bare, attach(bare, kv="full", cached_idle_s=_A_DAY_S) as held:
        for way in ways:
            say(f"the answers of an attached model: {way.name}")
            held.clear()
            for door in _DOORS[1:]:
                found[way.name, door] = way.answers(bare, num_new)
            assert held.usage.cached_tokens, f"{way.name}: nothing was found again"
        assert held.num_plain_calls == 0, f"{held.num_plain_calls} calls went past the cache"
        held.cache.check_integrity()
    return found


def _judged(loaded: LoadedModel, way: _Way, found: Answers, num_new: int) -> tuple[int, int]:
    """Answers that are not the reference's; those of them that differ no earlier than the reference does from itself
    are near-ties.
    """
    with loaded.model.original_attention() as bare:
        expected = way.answers(bare, num_new)
        if found == expected:
            return 0, 0
        with _another_attention(bare):
            again = way.answers(bare, num_new)
    compared = [
        (ours, theirs, other)
        for batch in zip(found, expected, again, strict=True)
        for ours, theirs, other in zip(*batch, strict=True)
        if ours != theirs
    ]
    ties = sum(_parts(theirs, other) <= _parts(theirs, ours) for ours, theirs, other in compared)
    return len(compared) - ties, ties


def _parts(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place where two answers differ; behind both where they do not."""
    place = first_difference(one, other)
    return max(len(one), len(other)) if place is None else place


@contextmanager
def _another_attention(model: Any) -> Iterator[None]:
    own: str = model.config._attn_implementation
    model.set_attn_implementation(_OTHER_ATTENTION.get(own, "eager"))
    try:
        yield
    finally:
        model.set_attn_implementation(own)
