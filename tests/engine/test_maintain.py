"""An engine that has nothing to do gives its memory back when it is asked to maintain."""

from __future__ import annotations

import threading

import pytest

from ktransformer2.engine.llm import LLM
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import EngineClosedError, OwnershipError
from ktransformer2.models.demo import random_model
from tests.engine.tiny_model import Bench, prompt


def test_memory_of_idle_blocks_goes_back_without_a_step() -> None:
    bench = Bench()
    bench.engine.add(prompt(200), SamplingParams(max_new_tokens=4, ignore_eos=True))
    while bench.engine.has_work:
        bench.engine.step()
    held = bench.cache.stats()
    idle_s = bench.cache.config.cached_idle_s
    bench.now_s += idle_s - 1
    bench.engine.maintain()
    assert bench.cache.stats().num_cached_blocks == held.num_cached_blocks > 0
    bench.now_s += 2
    bench.engine.maintain()
    stats = bench.cache.stats()
    assert (stats.num_blocks, stats.committed_bytes) == (0, 0)
    assert bench.engine.stats().num_steps == len(bench.model.batches)
    bench.check_integrity()
    bench.close()


def test_maintain_is_the_owners_and_ends_with_the_engine() -> None:
    bench = Bench()
    refused: list[type[Exception]] = []

    def use() -> None:
        try:
            bench.engine.maintain()
        except OwnershipError as error:
            refused.append(type(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert refused == [OwnershipError]
    bench.close()
    with pytest.raises(EngineClosedError):
        bench.engine.maintain()


def test_the_front_door_hands_it_on() -> None:
    with LLM(random_model("float32"), memory="64MB", cached_idle_s=0) as llm:
        llm.generate("The tenant", SamplingParams(max_new_tokens=2, ignore_eos=True))
        llm.maintain()
        assert llm.cache.stats().committed_bytes == 0
