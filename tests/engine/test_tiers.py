"""The engine over tiers: blocks come up while their prompts wait, others pass them, and answers are the same."""

from __future__ import annotations

import pytest

from ktransformer2.config import TierConfig
from ktransformer2.engine.outputs import RequestOutput
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.tiers.rates import LoadOrRecompute
from tests.engine.tiny_model import POISON, Bench, prompt
from tests.tiers.memory_tier import MemoryTier

PARAMS = SamplingParams(6, ignore_eos=True)
TEXT, OTHER = prompt(200, 1), prompt(40, 2)
MOST_STEPS = 2000


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier("disk")


def bench_over(tier: MemoryTier, **config: int) -> Bench:
    bench = Bench(**config)  # type: ignore[arg-type]  # sizes only
    bench.cache.join([tier], TierConfig())
    return bench


def run(bench: Bench, *waited_for: str) -> dict[str, RequestOutput]:
    """Steps until these requests are done."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(MOST_STEPS):
        for chunk in bench.engine.step():
            if chunk.output is not None:
                outputs[chunk.request_id] = chunk.output
        bench.check_integrity()
        if set(waited_for) <= set(outputs):
            return outputs
    raise AssertionError(f"{waited_for} did not end in {MOST_STEPS} steps")


def answered(bench: Bench, ids: list[int]) -> RequestOutput:
    request_id = bench.engine.add(ids, PARAMS)
    return run(bench, request_id)[request_id]


@pytest.fixture
def cold(tier: MemoryTier) -> RequestOutput:
    """The answer of an engine that knew nothing, and has kept what it read."""
    bench = bench_over(tier)
    output = answered(bench, TEXT)
    bench.close()
    assert output.usage.restored_tokens == {}
    return output


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_the_next_engine_reuses_every_full_block_and_answers_the_same(kv: str) -> None:
    tier, outputs = MemoryTier("disk"), []
    for _ in range(2):
        bench = Bench(kv=kv)
        bench.cache.join([tier], TierConfig())
        outputs.append(answered(bench, TEXT))
        bench.close()
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].usage.restored_tokens == {"disk": 192}
    assert outputs[1].usage.cached_tokens == 192
    assert outputs[1].usage.num_restored == 192


def test_others_pass_who_waits_for_a_tier(tier: MemoryTier, cold: RequestOutput) -> None:
    bench = bench_over(tier)
    tier.gate.clear()
    first, second = bench.engine.add(TEXT, PARAMS), bench.engine.add(OTHER, PARAMS)
    outputs = run(bench, second)
    assert first not in outputs
    assert bench.engine.step() == [], "nothing to do but to wait, for a moment"
    tier.gate.set()
    output = run(bench, first)[first]
    assert output.token_ids == cold.token_ids
    assert output.usage.restored_tokens == {"disk": 192}
    bench.close()


@pytest.mark.parametrize("num_blocks", [28, 36])
def test_what_left_before_its_turn_is_fetched_again(
    tier: MemoryTier, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for two texts, a queue that asks for four of them in turn: none is computed again."""
    monkeypatch.setattr(LoadOrRecompute, "computed", lambda *_: None)  # by this clock it takes no time
    texts = [prompt(200, seed) for seed in range(4)]
    bench = bench_over(tier)
    for text in texts:
        answered(bench, text)
    bench.close()
    bench = bench_over(tier, num_blocks=num_blocks, max_num_sequences=1)
    requests = [bench.engine.add(text, PARAMS) for text in texts * 3]
    outputs = run(bench, *requests)
    assert [outputs[each].usage.cached_tokens for each in requests] == [192] * 12
    assert sum(outputs[each].usage.num_restored for each in requests) > 6 * 192
    stats = bench.cache.stats()
    assert stats.prefetch_used_blocks >= 0.95 * stats.prefetched_blocks
    bench.close()


def test_a_tier_that_hangs_costs_some_time_and_no_answer(tier: MemoryTier, cold: RequestOutput) -> None:
    bench = bench_over(tier)
    tier.gate.clear()
    request_id = bench.engine.add(TEXT, PARAMS)
    assert bench.engine.step() == []
    bench.now_s += 100.0
    output = run(bench, request_id)[request_id]
    assert output.token_ids == cold.token_ids
    assert output.usage.restored_tokens == {}
    tier.gate.set()
    bench.close()


@pytest.mark.parametrize("call", ["get", "put", "may_hold"])
def test_a_tier_that_fails_is_a_miss(tier: MemoryTier, cold: RequestOutput, call: str) -> None:
    if call == "may_hold":
        tier.blocks.clear()
        tier.says_yes = True
    else:
        tier.raises.add(call)
    bench = bench_over(tier)
    output = answered(bench, TEXT)
    assert output.error is None
    assert output.token_ids == cold.token_ids
    bench.close()


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(tier: MemoryTier, cold: RequestOutput) -> None:
    del cold
    bench = bench_over(tier)
    tier.gate.clear()
    request_id = bench.engine.add(TEXT, PARAMS)
    bench.engine.step()
    assert bench.cache.staged_bytes > 0
    assert bench.engine.cancel(request_id) is not None
    tier.gate.set()
    bench.cache.wait_for_tiers(10.0)
    bench.engine.step()
    assert bench.cache.staged_bytes == 0
    assert bench.cache.stats().prefetch_late_blocks == 8, "what was being read; the rest was not asked for"
    bench.check_integrity()
    bench.close()


def test_a_cancelled_prefill_keeps_its_full_blocks(tier: MemoryTier) -> None:
    bench = bench_over(tier, max_step_tokens=40)
    request_id = bench.engine.add(TEXT, PARAMS)
    for _ in range(2):
        bench.engine.step()
    assert bench.engine.cancel(request_id) is not None
    assert bench.cache.match(TEXT).num_tokens == 80
    bench.close()
    assert len(tier.blocks) == 5
    bench = bench_over(tier)
    assert answered(bench, TEXT).usage.restored_tokens == {"disk": 80}
    bench.close()


def test_a_failed_prefill_keeps_what_was_read_before(tier: MemoryTier) -> None:
    bench = bench_over(tier, max_step_tokens=40)
    output = answered(bench, [*TEXT[:100], POISON, *TEXT[:20]])
    assert output.error is not None
    assert bench.cache.match(TEXT).num_tokens == 80
    bench.close()
    assert len(tier.blocks) == 5


def test_a_prompt_that_starves_beside_copies_in_flight_waits_for_their_room(tier: MemoryTier) -> None:
    """The largest prompt that is admitted finds room although a writer holds copies."""
    bench = bench_over(tier, num_blocks=12)
    answered(bench, OTHER)
    tier.gate.clear()
    answered(bench, OTHER)
    assert bench.cache.staged_bytes > 0
    request_id = bench.engine.add(prompt(180, 3), PARAMS)
    for _ in range(3):
        assert all(chunk.output is None for chunk in bench.engine.step())
    tier.gate.set()
    assert run(bench, request_id)[request_id].error is None
    bench.close()


def test_steps_teach_what_reading_costs(tier: MemoryTier, cold: RequestOutput) -> None:
    """A model that reads faster than the tier gives is left to read."""
    bench = bench_over(tier)
    lower = bench.cache._lower
    assert lower is not None
    lower._promotion.speeds.loaded(1000, 10.0, bench.clock())
    answered(bench, OTHER)  # in no time, by this clock
    output = answered(bench, TEXT)
    assert output.token_ids == cold.token_ids
    assert output.usage.restored_tokens == {}
    assert bench.cache.stats().not_worth_tokens == 192
    bench.close()
