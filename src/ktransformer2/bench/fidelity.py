"""The same answer whatever the cache does: greedy tokens beside `model.generate`, and int8 beside model precision.

Prompts drawn from real texts run alone, warm, and in two of the ways of `greedy_modes`; in fp32 also with int8 keys and
values, where the warm answer is held against the cold one (`int8_warm`). A quick run warms one prompt in four. A first
difference is judged by the numbers of what it is held against:
    fp32    a mismatch where the reference's margin between its two best logits exceeds 1e-3
    bf16    a near-tie where the margin in fp32 lies below the reference's own spread (batch 1, batch 8, chunked),
            else a mismatch; at most 1 prompt in 20 may have near-ties
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ktransformer2.bench import environment, int8_quality
from ktransformer2.bench.corpus import Drawing, DrawnPrompt, draw_prompts, text_of
from ktransformer2.bench.greedy_modes import BATCH_SIZE, DRAWN_MODES, Answer, GreedyModes
from ktransformer2.bench.journal import Journal
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.reference import GreedyRun, Reference
from ktransformer2.bench.subject import load_subject
from ktransformer2.kernels import attention
from ktransformer2.models.loading import LoadedModel

NUM_NEW = 32
PARTS = ("greedy", "int8")
FP32_MARGIN = 1e-3
_FULL_PROMPTS, _QUICK_PROMPTS = 200, 20
_FULL_TOKENS, _QUICK_TOKENS = 4000, 1000
_FULL_WINDOWS, _QUICK_WINDOWS = 8, 1
_QUICK_WARM_EVERY = 4  # prompts
RESUMABLE = True
Row = dict[str, object]
Judged = dict[str, Any]  # one answer: its mode, whether its way was taken, its first difference or None


@dataclass(frozen=True)
class Difference:
    """An answer's first token that is not the reference's. `spread` is 0 in fp32, where it is not asked."""

    prompt: int
    mode: str
    token: int
    margin: float
    spread: float
    verdict: str


@dataclass
class Comparison:
    """All answers of one dtype: per mode those compared (`answers`), and those whose way left its trace (`taken`)."""

    dtype: str
    answers: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def add(self, judged: Sequence[Judged]) -> None:
        for each in judged:
            self.answers[each["mode"]] += 1
            self.taken[each["mode"]] += each["taken"]
            if each["difference"] is not None:
                self.differences.append(Difference(**each["difference"]))

    def count(self, verdict: str) -> int:
        return sum(difference.verdict == verdict for difference in self.differences)

    def near_tie_prompts(self) -> int:
        return len({difference.prompt for difference in self.differences if difference.verdict == "near-tie"})


def first_difference(answer: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first place where two answers differ; None: nowhere. A shorter answer differs where it ends."""
    for place, (ours, theirs) in enumerate(zip(answer, expected, strict=False)):
        if ours != theirs:
            return place
    return None if len(answer) == len(expected) else min(len(answer), len(expected))


def verdict(dtype: str, margin: float, spread: float) -> str:
    """`tie` (fp32) or `near-tie` (bf16) for a difference that the reference's own numbers excuse, else `mismatch`."""
    if dtype == "bf16":
        return "near-tie" if margin < spread else "mismatch"
    return "mismatch" if margin > FP32_MARGIN else "tie"


def draw_modes(rng: random.Random) -> list[str]:
    """Two different ways for one prompt."""
    return rng.sample(DRAWN_MODES, 2)


class _Judge:
    """Decides on differences of one dtype; loads the fp32 model only when a bf16 difference asks for it."""

    def __init__(self, options: BenchOptions, dtype: str, loaded: LoadedModel) -> None:
        self._options, self._dtype, self._loaded = options, dtype, loaded
        self._exact: LoadedModel | None = None

    def judge(self, prompt: DrawnPrompt, run: GreedyRun, answer: Answer) -> Difference | None:
        place = first_difference(answer.token_ids, run.token_ids)
        if place is None:
            return None
        ids = [*prompt.token_ids, *run.token_ids[:place]]
        margin, spread = self._bf16(ids) if self._dtype == "bf16" else (run.margins[place], 0.0)
        found = Difference(prompt.index, answer.mode, place, margin, spread, verdict(self._dtype, margin, spread))
        say(f"{self._dtype}: prompt {prompt.index} ({prompt.kind}, {len(prompt.token_ids)} tokens): {found}")
        return found

    def _bf16(self, ids: Sequence[int]) -> tuple[float, float]:
        if self._exact is None:
            self._exact = load_subject(self._options, "fp32")
        with self._exact.model.original_attention() as model:
            margin = Reference(model).margin(ids)
        with self._loaded.model.original_attention() as model:
            return margin, Reference(model).spread(ids)


class _Comparing:
    """Every prompt alone, warm, and in its two ways, against the reference: piece by piece, as a journal keeps them."""

    def __init__(self, loaded: LoadedModel, judge: _Judge, options: BenchOptions) -> None:
        self._loaded, self._judge, self._options = loaded, judge, options
        self._modes = GreedyModes(loaded.model, NUM_NEW)

    def _rng(self, prompt: DrawnPrompt) -> random.Random:
        return random.Random(self._options.seed * 1_000_003 + prompt.index)

    def run(self, prompts: Sequence[DrawnPrompt], journal: Journal) -> Comparison:
        """What the journal lacks is done now."""
        comparison = Comparison(self._options.dtype or "")
        runs: dict[int, GreedyRun] = {}
        for prompt in prompts:
            piece = journal.piece(f"prompt {prompt.index}", partial(self._one, prompt))
            runs[prompt.index] = GreedyRun(tuple(piece["expected"]["token_ids"]), tuple(piece["expected"]["margins"]))
            comparison.add(piece["judged"])
            say(f"prompt {prompt.index + 1} of {len(prompts)}: {prompt.kind}, {len(prompt.token_ids)} tokens")
        batched = [prompt for prompt in prompts if "batch" in draw_modes(self._rng(prompt))]
        for group in batches(batched, prompts):
            name = "batch " + " ".join(str(prompt.index) for prompt in group)
            comparison.add(journal.piece(name, partial(self._batch, group, runs)))
        return comparison

    def _one(self, prompt: DrawnPrompt) -> dict[str, Any]:
        with self._loaded.model.original_attention() as model:
            expected = Reference(model).greedy(prompt.token_ids, NUM_NEW)
        modes, options, ids = self._modes, self._options, prompt.token_ids
        warm_too = not options.quick or prompt.index % _QUICK_WARM_EVERY == 0
        judged = self._judged(prompt, expected, modes.alone_and_warm(ids) if warm_too else [modes.alone(ids)])
        if warm_too and options.dtype == "fp32":
            cold, margins, warm = modes.sealed_cold_and_warm(ids)
            judged += self._judged(prompt, GreedyRun(cold, margins), [warm])
        rng = self._rng(prompt)
        for mode in draw_modes(rng):
            if mode != "batch":
                judged += self._judged(prompt, expected, modes.drawn(mode, ids, rng))
        return {"expected": asdict(expected), "judged": judged}

    def _batch(self, group: Sequence[DrawnPrompt], runs: Mapping[int, GreedyRun]) -> list[Judged]:
        answers = self._modes.batch([prompt.token_ids for prompt in group])
        return [
            judged
            for prompt, answer in zip(group, answers, strict=True)
            for judged in self._judged(prompt, runs[prompt.index], [answer])
        ]

    def _judged(self, prompt: DrawnPrompt, expected: GreedyRun, answers: Sequence[Answer]) -> list[Judged]:
        return [
            {
                "mode": answer.mode,
                "taken": answer.evidence > 0,
                "difference": None if (found := self._judge.judge(prompt, expected, answer)) is None else asdict(found),
            }
            for answer in answers
        ]


def batches(drawn: Sequence[DrawnPrompt], everyone: Sequence[DrawnPrompt]) -> list[list[DrawnPrompt]]:
    """The drawn prompts by eights; the last batch is filled up with others."""
    groups = [list(drawn[i : i + BATCH_SIZE]) for i in range(0, len(drawn), BATCH_SIZE)]
    if groups:
        others = [prompt for prompt in everyone if prompt not in groups[-1]]
        groups[-1] += others[: BATCH_SIZE - len(groups[-1])]
    return groups


def run(options: BenchOptions) -> Outcome:
    """Greedy answers in fp32 and bf16, and the quality of int8. `dtype` chooses one of the two; int8 goes with fp32."""
    drawing = Drawing(
        options.num_prompts or (_QUICK_PROMPTS if options.quick else _FULL_PROMPTS),
        options.max_tokens or (_QUICK_TOKENS if options.quick else _FULL_TOKENS),
        options.seed,
    )
    rows: list[Row] = []
    summary: dict[str, float] = {}
    source = ""
    for dtype in (options.dtype,) if options.dtype else ("fp32", "bf16"):
        loaded = load_subject(options, dtype)
        source = loaded.source
        if options.wants("greedy"):
            prompts = draw_prompts(drawing, loaded.tokenizer.encode)
            one = dataclasses.replace(options, dtype=dtype)
            comparing = _Comparing(loaded, _Judge(options, dtype, loaded), one)
            comparison = comparing.run(prompts, _journal(options, dtype, loaded, drawing))
            rows += _rows(comparison)
            summary |= _summary(comparison, len(prompts))
        if dtype == "fp32" and options.wants("int8"):
            more_rows, more = _int8(loaded, _QUICK_WINDOWS if options.quick else _FULL_WINDOWS)
            rows += more_rows
            summary |= more
    scenario: dict[str, object] = {"dtype": options.dtype or "fp32, bf16", "model": source, "num_new": NUM_NEW}
    return Outcome(rows, summary, scenario | {"num_prompts": drawing.count, "max_tokens": drawing.max_tokens})


def _journal(options: BenchOptions, dtype: str, loaded: LoadedModel, drawing: Drawing) -> Journal:
    """One file a dtype beside the name that was given; what is done there belongs to this very code and model."""
    path = None if options.resume is None else Path(f"{options.resume}.{dtype}.jsonl")
    run = {
        "commit": environment.commit(),
        "model": loaded.model.fingerprint.hex(),
        "threads": torch.get_num_threads(),
        "kernels": attention.backend_name(),
        "num_new": NUM_NEW,
        "quick": options.quick,
        **asdict(drawing),
    }
    journal = Journal(path, run)
    if len(journal):
        say(f"{len(journal)} pieces of {path} are done")
    return journal


def _summary(comparison: Comparison, num_prompts: int) -> dict[str, float]:
    mismatch = {f"mismatch_{comparison.dtype}": float(comparison.count("mismatch"))}
    if comparison.dtype == "bf16":
        mismatch["near_tie_share_bf16"] = comparison.near_tie_prompts() / num_prompts
    return mismatch


def _rows(comparison: Comparison) -> list[Row]:
    modes: list[Row] = [
        {
            "part": f"greedy answers of {NUM_NEW} tokens beside model.generate, {comparison.dtype}",
            "mode": mode,
            "answers": count,
            "way_taken": comparison.taken[mode],
            "identical": count - sum(d.mode == mode for d in comparison.differences),
            "near_ties": sum(d.mode == mode and d.verdict != "mismatch" for d in comparison.differences),
            "mismatches": sum(d.mode == mode and d.verdict == "mismatch" for d in comparison.differences),
        }
        for mode, count in comparison.answers.items()
    ]
    part = f"first differences, {comparison.dtype}"
    return modes + [{"part": part, **vars(difference)} for difference in comparison.differences]


def _int8(loaded: LoadedModel, num_windows: int) -> tuple[list[Row], dict[str, float]]:
    tokens = loaded.tokenizer.encode(text_of("wikitext"))
    windows = int8_quality.windows_of(tokens, num_windows)
    found = []
    for chunk in int8_quality.CHUNKS:
        say(f"int8 beside full on {len(windows)} windows of WikiText-2, chunk {chunk}")
        found.append(int8_quality.measure(loaded.model, windows, chunk))
    rows: list[Row] = [
        {
            "part": "int8 beside model precision, WikiText-2, 2,048 tokens of context",
            "chunk_tokens": quality.chunk_tokens,
            "predictions": quality.count,
            "kl": quality.mean_kl,
            "top1": quality.top1_share,
            "ppl_ratio": quality.ppl_ratio,
            "ppl_full": quality.ppl_full,
        }
        for quality in found
    ]
    return rows, {
        "kl_int8": max(quality.mean_kl for quality in found),
        "top1_int8": min(quality.top1_share for quality in found),
        "ppl_ratio_int8": max(quality.ppl_ratio for quality in found),
    }
