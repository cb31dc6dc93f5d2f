"""Memory that follows the text: what is held for real lengths, what is given back, and what it costs a step.

Parts: length traces replayed through the cache (`replay`), one sequence of a million tokens, the process after a
peak (`footprint`), decode steps while memory grows (`step_times`), requests a minute under one budget (`throughput`),
and what chose the defaults (`knobs`, `limits`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ktransformer2.bench import footprint, knobs, limits, step_times, throughput
from ktransformer2.bench.corpus import trace_path
from ktransformer2.bench.footprint import Footprint
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.replay import ReplayFigures, TraceReplay
from ktransformer2.bench.shapes import STATIC_TOKENS, geometry, token_bytes
from ktransformer2.bench.step_times import StepTimes
from ktransformer2.bench.threads import torch_threads
from ktransformer2.bench.throughput import Throughput
from ktransformer2.bench.traces import read_trace, thinned
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.layout import Form
from ktransformer2.models.batch import CausalModel

# Requests of a full and of a quick replay; every k-th of the trace, so that all of its hours are seen.
_TRACES = {
    "azure_2023_conv": (1500, 60),
    "azure_2023_code": (1000, 40),
    "mooncake_conversation": (100, 4),
    "mooncake_synthetic": (100, 4),
}
_LONG_STATIC_TOKENS = 131_072
_MILLION = 2**20
_PEAK_BYTES, _QUICK_PEAK_BYTES = 10**9, 10**8
_MODEL_PEAK_TOKENS = 4096
PARTS = ("traces", "million", "footprint", "steps", "throughput", "knobs", "limits")
Row = dict[str, object]


def run(options: BenchOptions) -> Outcome:
    """All parts, or those asked for; a quick run leaves out what needs a model."""
    rows: list[Row] = []
    summary: dict[str, float] = {}
    dtype = options.dtype or "bf16"
    parts: list[tuple[str, Callable[[], tuple[list[Row], dict[str, float]]]]] = [
        ("traces", lambda: _replays(options)),
        ("million", lambda: _million(_MILLION // 16 if options.quick else _MILLION)),
        ("footprint", lambda: _footprint(options, dtype)),
        ("knobs", lambda: (knobs.rows(options.quick), {})),
        ("limits", lambda: (limits.rows(options.quick), {})),
    ]
    if not options.quick and (options.wants("steps") or options.wants("throughput")):
        from ktransformer2.bench.subject import load_subject  # transformers: seconds that other parts save

        model = load_subject(options, dtype).model
        parts += [
            ("steps", lambda: _steps(model, 600)),
            ("throughput", lambda: _throughput(model, options)),
        ]
    for name, part in parts:
        if options.wants(name):
            more_rows, more = part()
            rows += more_rows
            summary |= more
    return Outcome(rows, summary, {"dtype": dtype, "traces": {name: count for name, (count, _) in _TRACES.items()}})


# --- length traces


def _replays(options: BenchOptions) -> tuple[list[Row], dict[str, float]]:
    replays = {name: _replayed(name, options) for name in _TRACES}
    return [_replay_row(name, figures) for name, figures in replays.items()], _replay_summary(list(replays.values()))


def _replayed(name: str, options: BenchOptions) -> ReplayFigures:
    requests = thinned(read_trace(trace_path(name)), _TRACES[name][options.quick])
    longest = max(request.total_tokens for request in requests)
    static_tokens = STATIC_TOKENS if name.startswith("azure") else _LONG_STATIC_TOKENS
    assert longest <= static_tokens, f"{name}: a request of {longest} tokens, a static cache of {static_tokens}"
    say(f"replaying {len(requests)} requests of {name}")
    with torch_threads(1):  # all tensors are tiny
        return TraceReplay(requests, static_tokens, CacheConfig()).run()


def _replay_row(name: str, figures: ReplayFigures) -> Row:
    return {
        "part": "length traces, SmolLM2 shapes, int8",
        "trace": name,
        "requests": figures.num_requests,
        "steps": figures.num_steps,
        "preempted": figures.num_preemptions,
        "waste_tokens": figures.waste_tokens,
        "waste_bytes": figures.waste_bytes,
        "growth_per_1k": figures.growth_per_1k_tokens,
        "copied_by_growth": figures.tokens_copied_by_growth,
        "saved_vs_static": figures.saved_vs_static,
        "saved_with_cached": figures.saved_vs_static_with_cached,
        "peak_mb": figures.peak_bytes / 1e6,
        "peak_static_mb": figures.peak_static_bytes / 1e6,
    }


def _replay_summary(figures: Sequence[ReplayFigures]) -> dict[str, float]:
    """The worst trace of each."""
    return {
        "waste_tokens": max(f.waste_tokens for f in figures),
        "waste_bytes": max(f.waste_bytes for f in figures),
        "growth_per_1k_tokens": max(f.growth_per_1k_tokens for f in figures),
        "tokens_copied_by_growth": float(sum(f.tokens_copied_by_growth for f in figures)),
        "saved_vs_static": min(f.saved_vs_static for f in figures),
    }


# --- one long sequence


def _million(num_tokens: int) -> tuple[list[Row], dict[str, float]]:
    """One sequence in three layers of SmolLM2's shape (their number does not change a ratio), 512 tokens a step."""
    say(f"one sequence of {num_tokens:,} tokens")
    cache = KVCache(geometry(3, 3, 64, num_tokens), CacheConfig())
    table = cache.new_table()
    with torch_threads(1):
        for start in range(0, num_tokens, 512):
            assert cache.allocate(table, 512), f"no room at {start} tokens"
            cache.prepare([(table, 512)])
            cache.publish(table, [(start + i) % 50_021 for i in range(512)])
            cache.maintain()
    held = cache.stats().held_bytes
    static = num_tokens * token_bytes(cache.geometry.groups[0], Form.BF16)
    cache.close()
    saved = 1 - held / static
    row: Row = {"part": "one sequence", "tokens": num_tokens, "held_mb": held / 1e6, "static_mb": static / 1e6}
    return [row | {"saved": saved}], {"saved_vs_static_1m": saved}


# --- the process, the steps, the throughput


def _footprint_row(name: str, found: Footprint) -> Row:
    return {"part": "bytes after a peak", "process": name, **dataclasses.asdict(found)}


def _footprint(options: BenchOptions, dtype: str) -> tuple[list[Row], dict[str, float]]:
    empty = footprint.measure(str(_QUICK_PEAK_BYTES if options.quick else _PEAK_BYTES))
    rows = [_footprint_row("without a model", empty)]
    if not options.quick:
        say("a peak with a model")
        rows.append(
            _footprint_row("with a model", footprint.measure(str(_MODEL_PEAK_TOKENS), options.model or "", dtype))
        )
    return rows, {
        "arena_resident_after_bytes": float(empty.resident_after),
        "rss_growth_after_bytes": float(empty.rss_growth_after),
    }


def _steps(model: CausalModel, num_steps: int) -> tuple[list[Row], dict[str, float]]:
    say(f"{num_steps} decode steps while memory grows, beside a control")
    living, control = step_times.compare(model, num_steps)
    assert living.growth_events, "nothing grew"
    assert living.moved_bytes, "nothing was moved"
    rows = [_steps_row(name, times) for name, times in (("growing", living), ("control", control))]
    return rows, {"step_p99_over_p50_vs_control": living.p99_over_p50 / control.p99_over_p50}


def _steps_row(name: str, times: StepTimes) -> Row:
    return {
        "part": "decode-only steps",
        "memory": name,
        "steps": len(times.seconds),
        "p50_ms": 1000 * sorted(times.seconds)[len(times.seconds) // 2],
        "p99_over_p50": times.p99_over_p50,
        "growth_events": times.growth_events,
        "moved_mb": times.moved_bytes / 1e6,
    }


def _throughput(model: CausalModel, options: BenchOptions) -> tuple[list[Row], dict[str, float]]:
    requests = throughput.drawn(read_trace(trace_path("azure_2023_conv")), options.num_prompts or 100, options.seed)
    say(f"{len(requests)} requests through a paged and a static cache")
    paged, static = throughput.compare(model, requests, options.seed)
    rows = [_rate_row(found) for found in (paged, static)]
    return rows, {"throughput_vs_static_same_bytes": paged.requests_per_minute / static.requests_per_minute}


def _rate_row(found: Throughput) -> Row:
    return {
        "part": "one budget, Azure chat lengths",
        "cache": found.name,
        "requests": found.num_requests,
        "requests_per_minute": found.requests_per_minute,
        "steps": found.num_steps,
        "preempted": found.num_preemptions,
        "peak_mb": found.peak_bytes / 1e6,
    }
