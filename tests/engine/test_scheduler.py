"""Who computes what in each step, exactly; on a real cache of 16-token blocks."""

from __future__ import annotations

import pytest

from ktransformer2.engine.outputs import RequestOutput
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import OutOfMemoryError
from tests.engine.tiny_model import Bench, prompt, prompts

Plan = list[tuple[str, int]]


def answer(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)


def step(bench: Bench) -> Plan:
    """One step: (request, tokens computed) in the order of the batch."""
    chunks = bench.engine.step()
    bench.check_integrity()
    return list(zip((chunk.request_id for chunk in chunks), bench.model.step_sizes[-1], strict=True))


def run(bench: Bench) -> tuple[list[Plan], dict[str, RequestOutput]]:
    """All steps until nothing is left, and what came out."""
    plans, outputs = [], {}
    while bench.engine.has_work:
        chunks = bench.engine.step()
        bench.check_integrity()
        ids = [chunk.request_id for chunk in chunks]
        plans.append(list(zip(ids, bench.model.step_sizes[-1], strict=True)))
        outputs.update({chunk.request_id: chunk.output for chunk in chunks if chunk.output is not None})
        assert len(plans) < 500
    return plans, outputs


def test_decodes_go_first_then_prompts_in_chunks_by_arrival() -> None:
    bench = Bench(max_step_tokens=16)
    for name, ids in zip("abc", prompts([20, 6, 30]), strict=True):
        bench.engine.add(ids, answer(3), request_id=name)
    plans, _ = run(bench)
    assert plans == [
        [("a", 16)],
        [("a", 4), ("b", 6), ("c", 6)],
        [("a", 1), ("b", 1), ("c", 14)],
        [("a", 1), ("b", 1), ("c", 10)],
        [("c", 1)],
        [("c", 1)],
    ]
    bench.close()


def test_a_newcomer_waits_for_a_place_and_never_overtakes() -> None:
    bench = Bench(max_num_sequences=2, max_step_tokens=64)
    for name, ids, new in zip("abcd", prompts([5, 6, 7, 8]), (4, 2, 2, 2), strict=True):
        bench.engine.add(ids, answer(new), request_id=name)
    plans, _ = run(bench)
    assert plans == [
        [("a", 5), ("b", 6)],
        [("a", 1), ("b", 1)],
        [("a", 1), ("c", 7)],
        [("a", 1), ("c", 1)],
        [("d", 8)],
        [("d", 1)],
    ]
    bench.close()


def test_no_more_run_than_can_decode_in_one_step() -> None:
    bench = Bench(max_num_sequences=8, max_step_tokens=2)
    for name, ids in zip("abc", prompts([2, 2, 2]), strict=True):
        bench.engine.add(ids, answer(2), request_id=name)
    plans, _ = run(bench)
    assert plans == [[("a", 2)], [("a", 1), ("b", 1)], [("b", 1), ("c", 1)], [("b", 1), ("c", 1)], [("c", 1)]]
    bench.close()


def test_the_newest_is_preempted_and_resumes_with_the_same_tokens() -> None:
    alone = Bench()
    for name, ids in zip("abc", prompts([30, 30, 30]), strict=True):
        alone.engine.add(ids, answer(16), request_id=name)
    _, expected = run(alone)
    assert alone.engine.stats().num_preemptions == 0

    bench = Bench(num_blocks=7)  # three times 45 computed tokens need 9
    for name, ids in zip("abc", prompts([30, 30, 30]), strict=True):
        bench.engine.add(ids, answer(16), request_id=name)
    plans, outputs = run(bench)
    # Two blocks each; at the 33rd token a takes the seventh, and b, needing the eighth, puts c out.
    assert plans[0] == [("a", 30), ("b", 30), ("c", 30)]
    assert plans[1:3] == [[("a", 1), ("b", 1), ("c", 1)]] * 2
    assert plans[3] == [("a", 1), ("b", 1)]
    assert [outputs[name].token_ids for name in "abc"] == [expected[name].token_ids for name in "abc"]
    assert [outputs[name].usage.num_preemptions for name in "abc"] == [0, 0, 1]
    assert bench.engine.stats().num_preemptions == 1
    # A preemption is not a hit of the prompt.
    assert [outputs[name].usage.cached_tokens for name in "abc"] == [0, 0, 0]
    bench.close()
    alone.close()


def test_a_prefix_hit_brings_a_preempted_sequence_back() -> None:
    bench = Bench(num_blocks=7)
    for name, ids, new in zip("abc", prompts([30, 30, 31]), (4, 4, 20), strict=True):
        bench.engine.add(ids, answer(new), request_id=name)
    plans, _ = run(bench)
    assert plans[:3] == [
        [("a", 30), ("b", 30), ("c", 31)],
        [("a", 1), ("b", 1), ("c", 1)],
        [("a", 1), ("b", 1), ("c", 1)],
    ]
    # All seven blocks are taken, three by c, the newest. It is put out, and a and b take its last two for their third
    # ones. When they are done it comes back with 34 tokens, the first 16 of which are still cached.
    assert plans[3:5] == [[("a", 1), ("b", 1)], [("c", 18)]]
    bench.close()


def test_an_older_prompt_takes_the_room_of_a_newer_answer_planned_in_the_same_step() -> None:
    alone = Bench()
    alone.engine.add(prompt(15, 2), answer(6), request_id="new")
    expected = run(alone)[1]["new"].token_ids
    alone.close()

    bench = Bench(num_blocks=4, max_step_tokens=24, max_num_sequences=2)
    two = SamplingParams(max_new_tokens=2, ignore_eos=True, n=2)
    bench.engine.add(prompt(40, 1), two, request_id="old")
    bench.engine.add(prompt(15, 2), answer(6), request_id="new")
    for _ in range(3):  # the second answer of old finds no place beside the first one and new
        bench.engine.step()
    bench.cache.clear()
    bench.engine.step()
    assert bench.model.step_sizes == [[24], [16, 8], [1, 7], [1, 23]]
    # new has planned its 17th token and taken the fourth block; old needs it for the third block of its 41 tokens.
    chunks = bench.engine.step()
    assert ([c.request_id for c in chunks], bench.model.step_sizes[-1]) == (["old"], [18])
    bench.check_integrity()
    _, outputs = run(bench)
    assert outputs["new"].token_ids == expected
    assert outputs["new"].usage.num_preemptions == 1
    bench.close()


def test_a_request_that_nothing_can_make_room_for_is_told_who_holds_it() -> None:
    bench = Bench(num_blocks=4)
    held = bench.cache.new_table()
    assert bench.cache.allocate(held, 40)
    bench.engine.add(prompt(40), answer(2), request_id="a")
    bench.engine.add(prompt(10), answer(2), request_id="b")
    (failed, first) = bench.engine.step()
    assert failed.output is not None
    assert isinstance(failed.output.error, OutOfMemoryError)
    assert "no room for the 40 tokens of request a" in str(failed.output.error)
    assert "held outside the engine" in str(failed.output.error)
    assert (first.request_id, len(first.token_ids)) == ("b", 1)
    bench.cache.release(held)
    bench.close()


def test_nothing_starves_under_a_stream_of_newcomers() -> None:
    bench = Bench(num_blocks=8, max_step_tokens=24, max_num_sequences=4)
    bench.engine.add(prompt(100), answer(20), request_id="long")
    added, finished = 0, []
    while "long" not in finished:
        if bench.engine.has_queue_room:
            bench.engine.add(prompt(12, added), answer(3))
            added += 1
        finished += [chunk.request_id for chunk in bench.engine.step() if chunk.output is not None]
        bench.check_integrity()
        assert bench.engine.stats().num_steps <= 5 + 19  # five chunks of 24, the rest of a step is for the others
    bench.close()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 48])
def test_the_cache_keeps_every_full_block_of_a_finished_request(num_tokens: int) -> None:
    bench = Bench(kv="int8")
    bench.engine.add(prompt(num_tokens), answer(1), request_id="a")
    run(bench)
    assert bench.num_used_blocks == 0
    assert bench.cache.match([*prompt(num_tokens), 1]).num_tokens == num_tokens // 16 * 16
    bench.close()
