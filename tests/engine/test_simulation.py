"""Hundreds of random steps with little memory: every answer is what it would be alone; a failure names its seed."""

from __future__ import annotations

import random
from functools import cache

import pytest

from ktransformer2.engine.sampling import SamplingParams
from tests.engine.tiny_model import Bench, prompt

NUM_STEPS = 250


@cache
def alone(kv: str, ids: tuple[int, ...], params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    bench = Bench(kv=kv)
    bench.engine.add(list(ids), params)
    output = None
    while output is None:
        output = bench.engine.step()[-1].output
    bench.close()
    return tuple(completion.token_ids for completion in output.completions)


def random_request(draw: random.Random) -> tuple[tuple[int, ...], SamplingParams]:
    """Prompts that share beginnings, so that there are hits; few kinds, so that `alone` is quick."""
    ids = prompt(draw.choice([20, 50]), draw.randrange(2)) + prompt(draw.choice([1, 12, 17]), draw.randrange(2, 4))
    new, temperature = draw.choice([1, 9, 20]), draw.choice([0.0, 1.0])
    seed, n = draw.randrange(2), draw.choice([1, 1, 3])
    return tuple(ids), SamplingParams(new, temperature, seed=seed, ignore_eos=True, n=n)


@pytest.mark.parametrize("kv", ["full", "int8"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_with_little_memory(seed: int, kv: str) -> None:
    draw = random.Random(seed)
    bench = Bench(num_blocks=13, kv=kv, max_step_tokens=24, max_num_sequences=5, max_queued_requests=4)
    running: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    num_checked = 0
    for _ in range(NUM_STEPS):
        if bench.engine.has_queue_room and draw.random() < 0.4:
            ids, params = random_request(draw)
            running[bench.engine.add(list(ids), params)] = ids, params
        if running and draw.random() < 0.04:
            cancelled = draw.choice(list(running))
            del running[cancelled]
            assert bench.engine.cancel(cancelled) is not None
        if draw.random() < 0.02:
            bench.cache.clear()
        if draw.random() < 0.05:
            bench.cache.defragment()
        for chunk in bench.engine.step():
            if chunk.output is not None:
                got = tuple(completion.token_ids for completion in chunk.output.completions)
                assert got == alone(kv, *running.pop(chunk.request_id)), f"seed {seed}: {chunk.request_id}"
                num_checked += 1
        bench.check_integrity()
    stats = bench.engine.stats()
    assert num_checked > 20
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0
    for request_id in running:
        bench.engine.cancel(request_id)
    assert bench.num_used_blocks == 0
    bench.check_integrity()
    bench.close()
