"""Requests a minute under one budget: the paged int8 cache beside static reservation, on the same engine and kernels.

The budget is that of two static 8,192-token sequences in bf16. Static means: two sequences at once, each with room for
8,192 tokens, in the model's precision. Both engines take turns step by step until their requests are done; only the
time of their own steps counts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ktransformer2.bench.shapes import STATIC_TOKENS, token_bytes
from ktransformer2.bench.traces import TraceRequest
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.layout import Form
from ktransformer2.models.batch import CausalModel

STATIC_SEQUENCES = 2


@dataclass(frozen=True)
class Throughput:
    """What one way of holding the cache did with all requests."""

    name: str
    num_requests: int
    seconds: float
    num_steps: int
    num_preemptions: int
    peak_bytes: int

    @property
    def requests_per_minute(self) -> float:
        return 60 * self.num_requests / self.seconds


class _Runner:
    def __init__(self, name: str, model: CausalModel, cache: CacheConfig, engine: EngineConfig) -> None:
        self.name = name
        self.cache = KVCache(model.geometry, cache, model.fingerprint)
        self.engine = Engine(model, self.cache, config=engine)
        self.seconds = 0.0

    def step(self) -> None:
        begin = time.perf_counter()
        self.engine.step()
        self.seconds += time.perf_counter() - begin

    def result(self, num_requests: int) -> Throughput:
        stats, peak = self.engine.stats(), self.cache.stats().peak_bytes
        assert stats.num_finished == num_requests, f"{self.name}: {stats.num_finished} of {num_requests} finished"
        self.engine.close()
        self.cache.close()
        return Throughput(self.name, num_requests, self.seconds, stats.num_steps, stats.num_preemptions, peak)


def budget_bytes(model: CausalModel) -> int:
    """Two static sequences of 8,192 tokens in bf16, whatever the model computes in."""
    per_token = sum(token_bytes(group, Form.BF16) for group in model.geometry.groups)
    return STATIC_SEQUENCES * STATIC_TOKENS * per_token


def drawn(requests: Sequence[TraceRequest], count: int, seed: int) -> list[TraceRequest]:
    """`count` requests of the trace that fit a static sequence, drawn by seed."""
    fitting = [request for request in requests if request.total_tokens <= STATIC_TOKENS]
    return random.Random(seed).sample(fitting, count)


def compare(model: CausalModel, requests: Sequence[TraceRequest], seed: int) -> tuple[Throughput, Throughput]:
    """(paged, static): both answer all requests, which wait from the start."""
    budget = budget_bytes(model)
    full = 2 * budget if model.geometry.full_form is Form.FP32 else budget
    paged = _Runner("paged int8", model, CacheConfig(memory_bytes=budget), EngineConfig())
    # 1/8 more: page tables, and reserve that a static buffer does not have. It never admits a third sequence.
    static = _Runner(
        "static",
        model,
        CacheConfig(kv="full", memory_bytes=full + full // 8),
        EngineConfig(max_num_sequences=STATIC_SEQUENCES),
    )
    rng = random.Random(seed)
    for request in requests:
        prompt = [rng.randrange(model.vocab_size) for _ in range(request.prompt_tokens)]
        for runner in (paged, static):
            runner.engine.add(prompt, SamplingParams(max_new_tokens=request.output_tokens, ignore_eos=True))
    while paged.engine.has_work or static.engine.has_work:
        for runner in (paged, static):
            if runner.engine.has_work:
                runner.step()
    return paged.result(len(requests)), static.result(len(requests))
