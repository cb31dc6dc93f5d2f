"""What chose the defaults that bound something: how long a block is kept, how many run at once, how much is copied.

    times        the gaps between two uses of a block in traces with a clock. A block that waits longer than the value
                 is gone; one that waits holds its room all the while, after its last use for the whole value. Room is
                 not scarce here: what leaves for want of it is another question (`knobs`). The traces hold no
                 pause longer than a day: of longer ones it says nothing.
    sequences    chat lengths that all wait from the start, under the memory of two static sequences
    copies       the length traces of `knobs`, with the most that was copied between two looks
    growth       one text that grows to 128k tokens: only there do growths follow each other

Values are judged as in `knobs`: less of every figure is better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ktransformer2.bench.corpus import block_trace_path, trace_path
from ktransformer2.bench.knobs import Row, Trial, judged
from ktransformer2.bench.outcome import say
from ktransformer2.bench.policy_trace import BlockRequest, Interleaving, read_agentic, read_block_trace
from ktransformer2.bench.replay import ReplayFigures, TraceReplay
from ktransformer2.bench.shapes import STATIC_TOKENS, smollm2, token_bytes
from ktransformer2.bench.threads import torch_threads
from ktransformer2.bench.traces import TraceRequest, read_trace, thinned
from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.layout import Form

_HOUR, _DAY = 3600.0, 86_400.0
_LIFETIMES = (_HOUR, _DAY, 7 * _DAY, 30 * _DAY)
# Values of every knob, its default among them.
GRID: Mapping[str, tuple[float, ...]] = {
    "cached_idle_s": (60, 150, 300, 600, 1200),
    "disk_ttl_s": _LIFETIMES,
    "valkey_ttl_s": _LIFETIMES,
    "max_num_sequences": (8, 16, 32, 64),
    "maintain_bytes": (2**20, 2**22, 2**23, 2**24, 2**26),
    "growth_factor": (1.0, 1.25, 1.5, 2.0, 3.0),
}
_MOONCAKE = ("mooncake_conversation_blocks", "mooncake_synthetic_blocks")
_AGENTS = Interleaving(seed=2024, max_touches=2_000_000)
_QUICK_AGENTS = Interleaving(seed=2024, max_touches=50_000)
# Requests of a full and of a quick run.
_CHATS = (80, 20)
_LENGTHS = {"azure_2023_conv": (60, 12), "azure_2023_code": (30, 6)}
_LONG_TOKENS, _LONG_STATIC_TOKENS = (120_000, 8_000), 131_072
Figures = dict[str, float]


def rows(quick: bool) -> list[Row]:
    """A row for every knob and value; that of the default says how the others compare with it."""
    parts: tuple[tuple[str, tuple[str, ...], Callable[[bool], Callable[[str, Any], Figures]]], ...] = (
        ("limits, gaps between two uses of a block", ("cached_idle_s", "disk_ttl_s", "valkey_ttl_s"), _times),
        ("limits, chats in the memory of two static sequences", ("max_num_sequences",), _sequences),
        ("limits, what is copied between two looks", ("maintain_bytes",), _copies),
        ("limits, one growing text", ("growth_factor",), _growth),
    )
    found: list[Row] = []
    for part, knobs, prepare in parts:
        say(part)
        measure = prepare(quick)
        for knob in knobs:
            found += judged(part, [Trial(knob, value, measure(knob, value)) for value in GRID[knob]])
    return found


# --- times


def gaps(requests: Sequence[BlockRequest]) -> tuple[list[float], int]:
    """(seconds between two uses, for every use but a block's first; how many blocks there are)."""
    uses: dict[int, list[float]] = {}
    for request in requests:
        for block in request.ids:
            uses.setdefault(block, []).append(request.at_s)
    return [later - earlier for times in uses.values() for earlier, later in pairwise(times)], len(uses)


def kept_for(seconds: float, between: Sequence[float], num_blocks: int) -> Figures:
    """Share of the uses that come too late, and how long a block waits for nothing or for its use, on average."""
    waited = sum(min(gap, seconds) for gap in between) + num_blocks * seconds
    return {
        "missed": sum(gap > seconds for gap in between) / len(between),
        "held_s_per_use": waited / (len(between) + num_blocks),
    }


def _times(quick: bool) -> Callable[[str, float], Figures]:
    sessions = read_agentic(block_trace_path("weka_agentic_coding_blocks"), _QUICK_AGENTS if quick else _AGENTS)
    traces = [gaps(sessions.requests), *(gaps(read_block_trace(block_trace_path(name)).requests) for name in _MOONCAKE)]
    return lambda _, seconds: _worst([kept_for(seconds, *trace) for trace in traces])


# --- lengths


def _sequences(quick: bool) -> Callable[[str, int], Figures]:
    budget = 2 * STATIC_TOKENS * token_bytes(smollm2().groups[0], Form.BF16)
    chats = thinned(read_trace(trace_path("azure_2023_conv")), _CHATS[quick])
    waiting = [dataclasses.replace(request, arrival_s=0.0) for request in chats]
    asked = sum(request.total_tokens for request in waiting)

    def measure(_: str, value: int) -> Figures:
        found = _replayed(waiting, CacheConfig(memory_bytes=budget), EngineConfig(max_num_sequences=value))
        return {
            "steps": float(found.num_steps),
            "preempted": found.num_preemptions / found.num_requests,
            "computed_per_token": found.computed_tokens / asked,
        }

    return measure


def _copies(quick: bool) -> Callable[[str, int], Figures]:
    traces = [thinned(read_trace(trace_path(name)), counts[quick]) for name, counts in _LENGTHS.items()]

    def measure(_: str, value: int) -> Figures:
        config = CacheConfig(cached_share_ratio=0.0, maintain_bytes=value)
        replays = [_replayed(requests, config) for requests in traces]
        return _worst(
            [
                {
                    "waste_bytes": found.waste_bytes,
                    "fragmentation": found.fragmentation,
                    "moved_per_token": found.moved_per_token,
                    "longest_copy_mb": found.longest_copy_bytes / 1e6,
                }
                for found in replays
            ]
        )

    return measure


def _growth(quick: bool) -> Callable[[str, float], Figures]:
    text = [TraceRequest(0.0, _LONG_TOKENS[quick], 100)]

    def measure(_: str, value: float) -> Figures:
        found = _replayed(text, CacheConfig(growth_factor=value), static_tokens=_LONG_STATIC_TOKENS)
        return {
            "waste_bytes": found.waste_bytes,
            "growth_per_1k": found.growth_per_1k_tokens,
            "calls_per_1k": found.calls_per_1k_tokens,
        }

    return measure


def _replayed(
    requests: Sequence[TraceRequest],
    config: CacheConfig,
    engine: EngineConfig | None = None,
    static_tokens: int = STATIC_TOKENS,
) -> ReplayFigures:
    with torch_threads(1):  # all tensors are tiny
        return TraceReplay(requests, static_tokens, config, engine).run()


def _worst(found: Sequence[Figures]) -> Figures:
    return {name: max(figures[name] for figures in found) for name in found[0]}
