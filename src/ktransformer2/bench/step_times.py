"""Decode steps while memory grows and is defragmented, beside a control whose memory was committed beforehand.

Two engines on one model take turns step by step, so that both meet the same machine. The living one has the shipped
defaults: its long answers grow block by block, and between them lie the blocks of short answers that have become idle,
so that the defragmenter has work. The control has a chunk that covers everything, written once before the clock starts,
and its defragmenter never comes.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from ktransformer2.bench.footprint import touch
from ktransformer2.bench.rounds import quantile
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.batch import CausalModel

_PROMPT_TOKENS = 48
_LONG, _SHORT = 8, 8
_SHORT_ANSWER_TOKENS = 130


@dataclass(frozen=True)
class StepTimes:
    """Seconds of decode-only steps, and what the cache did meanwhile."""

    seconds: list[float]
    growth_events: int
    moved_bytes: int

    @property
    def p99_over_p50(self) -> float:
        return quantile(self.seconds, 0.99) / quantile(self.seconds, 0.5)


class _Runner:
    """One engine with its cache and its own clock."""

    def __init__(self, model: CausalModel, config: CacheConfig) -> None:
        self.idle_s = 0.0
        self.cache = KVCache(model.geometry, config, model.fingerprint, lambda: time.monotonic() + self.idle_s)
        self.engine = Engine(model, self.cache)
        self.seconds: list[float] = []
        self._vocab_size = model.vocab_size

    def commit_beforehand(self, num_tokens: int) -> None:
        """Take, write and let go room for `num_tokens`: the memory stays committed, since a chunk covers all of it."""
        tables = [self.cache.new_table(publish=False) for _ in range(2 * (_LONG + _SHORT))]
        for table in tables:
            assert self.cache.allocate(table, num_tokens // len(tables) | 1), "no room for what is committed beforehand"
        (batch, *_) = self.cache.prepare([(table, table.pending) for table in tables])
        touch(batch)
        for table in tables:
            self.cache.release(table)

    def read_prompts(self, num_steps: int) -> None:
        """Start long and short answers in turns, so that their blocks lie between each other; read all prompts."""
        for i in range(_LONG + _SHORT):
            length = num_steps + 2 * _SHORT_ANSWER_TOKENS if i % 2 else _SHORT_ANSWER_TOKENS
            prompt = [(7 * i + p * p) % self._vocab_size for p in range(_PROMPT_TOKENS)]
            self.engine.add(prompt, SamplingParams(max_new_tokens=length, ignore_eos=True))
        while self.engine.stats().num_finished < _SHORT:
            self.engine.step()
        self.idle_s += self.cache.config.cached_idle_s + 1  # what the short answers left behind is idle now

    def step(self) -> None:
        begin = time.perf_counter()
        self.engine.step()
        self.seconds.append(time.perf_counter() - begin)

    def close(self) -> None:
        self.engine.close()
        self.cache.close()


def compare(model: CausalModel, num_steps: int) -> tuple[StepTimes, StepTimes]:
    """(living, control): `num_steps` decode-only steps of each, in turns."""
    room = (_LONG + _SHORT) * (_PROMPT_TOKENS + num_steps + 2 * _SHORT_ANSWER_TOKENS)
    still = dataclasses.replace(
        CacheConfig(), min_chunk_tokens=2 * room, max_fragmentation_ratio=1.0, defrag_interval_requests=10**9
    )
    runners = _Runner(model, CacheConfig()), _Runner(model, still)
    runners[1].commit_beforehand(room)
    for runner in runners:
        runner.read_prompts(num_steps)
    before = [runner.cache.stats() for runner in runners]
    for i in range(num_steps):
        for runner in runners if i % 2 else runners[::-1]:
            runner.step()
    found = []
    for runner, was in zip(runners, before, strict=True):
        now = runner.cache.stats()
        found.append(
            StepTimes(runner.seconds, now.growth_events - was.growth_events, now.moved_bytes - was.moved_bytes)
        )
        runner.close()
    return found[0], found[1]
