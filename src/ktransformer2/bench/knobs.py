"""What chose the defaults: every knob of growing, shrinking and packing at values round its default, on real lengths.

Length traces are replayed (`replay`) with nothing kept for reuse: memory then follows the running texts alone, so
growth, shrink and the defragmenter work all the time, and texts that come and go leave holes. One knob is moved at a
time. What is kept for reuse is another question, asked of the sessions of a coding agent (`policy_sim`): two users,
each one session after another, and the shipped limit.

A value *beats* the default where a figure is better by 5 % or more and none is worse by more than 1 %. Changes are
relative to the default's figure, or to 0.01 where that is smaller. Figures of several traces: the worst of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktransformer2 import settings
from ktransformer2.bench import policy_sim
from ktransformer2.bench.corpus import block_trace_path, trace_path
from ktransformer2.bench.outcome import say
from ktransformer2.bench.policy_trace import Interleaving, read_agentic
from ktransformer2.bench.replay import ReplayFigures, TraceReplay
from ktransformer2.bench.shapes import STATIC_TOKENS, smollm2, token_bytes
from ktransformer2.bench.threads import torch_threads
from ktransformer2.bench.traces import read_trace, thinned
from ktransformer2.cache.replacement import make_policy
from ktransformer2.config import CacheConfig
from ktransformer2.layout import Form

Row = dict[str, object]

# Values of every knob, its default among them.
GRID: Mapping[str, tuple[float, ...]] = {
    "block_tokens": (16, 32, 64, 128, 256),
    "initial_headroom_ratio": (1.0, 1.2, 1.5),
    "low_free_ratio": (0.0, 0.2, 0.5),
    "shrink_threshold_ratio": (0.25, 0.5, 0.75),
    "shrink_check_tokens": (10, 100, 1000),
    "min_chunk_tokens": (128, 256, 512),
    "defrag_interval_requests": (10, 1000, 100_000),
    "max_fragmentation_ratio": (0.1, 0.3, 0.5, 0.9),
}
REUSE: Mapping[str, tuple[float, ...]] = {"cached_share_ratio": (0.1, 0.25, 0.5, 0.75, 1.0)}
# Requests of a full and of a quick run.
_TRACES = {"azure_2023_conv": (60, 12), "azure_2023_code": (30, 6)}
_SESSIONS, _SESSION_BLOCK_TOKENS = "weka_agentic_coding_blocks", 64
_SESSIONS_LAID = Interleaving(seed=2024, max_touches=500_000, num_lanes=2)
_QUICK_SESSIONS_LAID = Interleaving(seed=2024, max_touches=50_000, num_lanes=2)
_ALIKE, _BETTER, _LEAST = 0.01, 0.05, 0.01


@dataclass(frozen=True)
class Trial:
    """A knob at a value, and what came of it: figures of which less is better."""

    knob: str
    value: float
    figures: Mapping[str, float]

    @property
    def is_default(self) -> bool:
        return bool(self.value == settings.knobs()[self.knob].default)

    def changes(self, default: Trial) -> dict[str, float]:
        """Relative change of every figure; 0.1: a tenth more."""
        return {
            name: (self.figures[name] - was) / max(abs(was), _LEAST) for name, was in default.figures.items()
        }  # fmt: skip

    def beats(self, default: Trial) -> bool:
        changes = self.changes(default).values()
        return max(changes) <= _ALIKE and min(changes) <= -_BETTER


def rows(quick: bool) -> list[Row]:
    """A row for every knob and value; that of the default says how the others compare with it."""
    lengths = _of_lengths(quick)
    return [
        *(
            row
            for knob in GRID
            for row in judged("knobs, nothing kept for reuse", [t for t in lengths if t.knob == knob])
        ),
        *(row for knob in REUSE for row in judged("knobs, blocks kept for reuse", _of_reuse(knob, quick))),
    ]


def judged(part: str, trials: Sequence[Trial]) -> list[Row]:
    """The rows of one knob, its default among the trials."""
    (default,) = (trial for trial in trials if trial.is_default)
    return [
        {
            "part": part,
            "knob": trial.knob,
            "value": trial.value,
            **trial.figures,
            "against_default": _verdict(trials, default) if trial is default else _said(trial.changes(default)),
        }
        for trial in trials
    ]


def _verdict(trials: Sequence[Trial], default: Trial) -> str:
    others = [trial for trial in trials if trial is not default]
    if not any(_differs(trial.changes(default)) for trial in others):
        return "DEFAULT: this does not tell the values apart"
    better = [f"{trial.value:g}" for trial in others if trial.beats(default)]
    return f"DEFAULT: beaten by {', '.join(better)}" if better else "DEFAULT: none beats it"


def _differs(changes: Mapping[str, float]) -> bool:
    return any(abs(change) > _ALIKE for change in changes.values())


def _said(changes: Mapping[str, float]) -> str:
    moved = [f"{name} {change:+.0%}" for name, change in changes.items() if abs(change) > _ALIKE]
    return ", ".join(moved) or "alike"


# --- lengths


def _of_lengths(quick: bool) -> list[Trial]:
    default = _replayed({}, quick)
    trials = []
    for knob, values in GRID.items():
        for value in values[:: len(values) - 1] if quick else values:
            if value != getattr(CacheConfig(), knob):
                say(f"{knob} = {value:g}")
                trials.append(Trial(knob, value, _replayed({knob: value}, quick)))
        trials.append(Trial(knob, getattr(CacheConfig(), knob), default))
    return sorted(trials, key=lambda trial: (list(GRID).index(trial.knob), trial.value))


def _replayed(changed: Mapping[str, Any], quick: bool) -> dict[str, float]:
    config = CacheConfig(**{"cached_share_ratio": 0.0, **changed})
    found = []
    with torch_threads(1):  # all tensors are tiny
        for name, counts in _TRACES.items():
            requests = thinned(read_trace(trace_path(name)), counts[quick])
            found.append(_figures(TraceReplay(requests, STATIC_TOKENS, config).run()))
    return {name: max(figures[name] for figures in found) for name in found[0]}


def _figures(found: ReplayFigures) -> dict[str, float]:
    return {
        "waste_tokens": found.waste_tokens,
        "waste_bytes": found.waste_bytes,
        "bytes_per_token": found.held.committed / found.held.tokens,
        "growth_per_1k": found.growth_per_1k_tokens,
        "calls_per_1k": found.calls_per_1k_tokens,
        "moved_per_token": found.moved_per_token,
        "fragmentation": found.fragmentation,
    }


# --- reuse


def _of_reuse(knob: str, quick: bool) -> list[Trial]:
    """Misses of a cache of that share of the shipped limit, and what it keeps."""
    laid = _QUICK_SESSIONS_LAID if quick else _SESSIONS_LAID
    requests = read_agentic(block_trace_path(_SESSIONS), laid).requests
    group = smollm2().groups[0]
    limit = CacheConfig().memory_bytes
    touches = sum(len(request.ids) for request in requests)
    trials = []
    for value in REUSE[knob]:
        say(f"{knob} = {value:g}")
        capacity = int(value * limit / (token_bytes(group, Form.INT8) * _SESSION_BLOCK_TOKENS))
        hits = policy_sim.replay(requests, lambda clock: make_policy(CacheConfig().replacement, clock), capacity).hits
        trials.append(Trial(knob, value, {"missed": 1 - sum(hits) / touches, "kept_mb": value * limit / 1e6}))
    return trials
