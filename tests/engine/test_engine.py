"""The engine on a real cache and a small real model: what comes out, what is refused, and what is left behind."""

from __future__ import annotations

import multiprocessing
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ktransformer2.config import EngineConfig, format_bytes
from ktransformer2.engine.admission import Admission
from ktransformer2.engine.detokenizer import Vocabulary
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.outputs import RequestOutput, StreamChunk
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import (
    ContextLengthError,
    EmptyPromptError,
    EngineClosedError,
    KTransformerError,
    NumericsError,
    OutOfMemoryError,
    OwnershipError,
    QueueFullError,
    RequestError,
)
from tests.engine.byte_tokenizer import VOCAB_SIZE
from tests.engine.tiny_model import POISON, Bench, TinyModel, prompt, prompts

SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.check_integrity()
    made.close()


def finish(bench: Bench) -> dict[str, RequestOutput]:
    return {c.request_id: c.output for c in run(bench) if c.output is not None}


def run(bench: Bench) -> list[StreamChunk]:
    chunks: list[StreamChunk] = []
    while bench.engine.has_work:
        chunks += bench.engine.step()
        bench.check_integrity()
        assert bench.engine.stats().num_steps < 1000
    return chunks


def answer_alone(ids: list[int], params: SamplingParams, **config: Any) -> tuple[int, ...]:
    bench = Bench(**config)
    bench.engine.add(ids, params, request_id="a")
    tokens = finish(bench)["a"].token_ids
    bench.close()
    return tokens


# --- the same answer, however it is computed


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("kv", ["full", "int8"])
def test_a_ragged_batch_answers_as_each_prompt_alone(kv: str, params: SamplingParams) -> None:
    lengths = [1, 7, 16, 40, 70, 100]
    alone = [answer_alone(ids, params) for ids in prompts(lengths)] if kv == "full" else None
    bench = Bench(kv=kv)
    for name, ids in zip("abcdef", prompts(lengths), strict=True):
        bench.engine.add(ids, params, request_id=name)
    together = finish(bench)
    if alone is None:
        alone = []
        for ids in prompts(lengths):
            other = Bench(kv=kv)
            other.engine.add(ids, params, request_id="a")
            alone.append(finish(other)["a"].token_ids)
            other.close()
    assert [together[name].token_ids for name in "abcdef"] == alone
    assert all(len(tokens) == 12 for tokens in alone)
    bench.close()


@pytest.mark.parametrize("max_step_tokens", [1, 13, 16, 64])
def test_a_prompt_in_chunks_is_answered_as_in_one_piece(max_step_tokens: int) -> None:
    assert answer_alone(prompt(90), GREEDY, max_step_tokens=max_step_tokens) == answer_alone(prompt(90), GREEDY)


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_warm_equals_cold_and_counts_what_was_found(kv: str) -> None:
    bench = Bench(kv=kv)
    bench.engine.add(prompt(90), GREEDY, request_id="cold")
    cold = finish(bench)["cold"]
    bench.engine.add(prompt(90), GREEDY, request_id="warm")
    warm = finish(bench)["warm"]
    assert warm.token_ids == cold.token_ids
    # Below model precision a hit ends on a block boundary; at model precision only the last token is left.
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 89 if kv == "full" else 80)
    assert bench.engine.stats().cached_tokens == warm.usage.cached_tokens
    bench.close()


@pytest.mark.parametrize(("kv", "found"), [("full", 40 + 11), ("int8", 48)])
def test_the_second_turn_finds_the_first_ones_answer(kv: str, found: int) -> None:
    bench = Bench(kv=kv)
    bench.engine.add(prompt(40), GREEDY, request_id="first")
    first = finish(bench)["first"]
    bench.engine.add([*prompt(40), *first.token_ids, *prompt(9, 1)], GREEDY, request_id="second")
    # 52 tokens are known, all but the last were computed.
    assert finish(bench)["second"].usage.cached_tokens == found
    bench.close()


def test_requests_of_different_salt_share_nothing(bench: Bench) -> None:
    for name, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        bench.engine.add(prompt(40), GREEDY, request_id=name, salt=salt)
        assert finish(bench)[name].usage.cached_tokens == (39 if name == "c" else 0)


# --- several answers


@pytest.mark.parametrize("max_num_sequences", [8, 2, 1])
def test_four_answers_read_the_prompt_once(max_num_sequences: int) -> None:
    bench = Bench(max_num_sequences=max_num_sequences)
    four = SamplingParams(max_new_tokens=12, temperature=1.0, seed=11, ignore_eos=True, n=4)
    bench.engine.add(prompt(40), four, request_id="a")
    output = finish(bench)["a"]
    answers = [completion.token_ids for completion in output.completions]
    assert [completion.index for completion in output.completions] == [0, 1, 2, 3]
    assert len(set(answers)) == 4
    assert answers[0] == answer_alone(prompt(40), SamplingParams(12, 1.0, seed=11, ignore_eos=True))
    assert output.usage.new_tokens == 48
    # The prompt once; those who found no place read again what was not cached, the tail block's rows at most.
    assert bench.engine.stats().prefill_tokens == 40
    assert bench.num_used_blocks == 0
    again = Bench()
    again.engine.add(prompt(40), four, request_id="a")
    assert [completion.token_ids for completion in finish(again)["a"].completions] == answers
    again.close()
    bench.close()


def test_forks_share_the_prompts_blocks(bench: Bench) -> None:
    bench.engine.add(prompt(40), SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True, n=4))
    bench.engine.step()
    assert bench.num_used_blocks == 3
    bench.engine.step()
    assert bench.num_used_blocks == 2 + 4  # the filling block was copied on write
    run(bench)


def test_answers_that_end_at_once_need_no_fork(bench: Bench) -> None:
    bench.engine.add(prompt(40), SamplingParams(max_new_tokens=1, n=3), request_id="a")
    chunks = bench.engine.step()
    assert [(c.index, c.finish_reason, c.output is not None) for c in chunks] == [
        (0, "length", False),
        (1, "length", False),
        (2, "length", True),
    ]


# --- when an answer ends


def test_the_end_token_ends_an_answer_unless_ignored() -> None:
    # A tiny model's own first token serves as the end token of the second run.
    first = answer_alone(prompt(10), GREEDY)
    bench = Bench()
    stop = SamplingParams(max_new_tokens=12, stop_token_ids=[first[3]], ignore_eos=True)
    bench.engine.add(prompt(10), stop, request_id="a")
    output = finish(bench)["a"]
    assert output.token_ids == first[: first.index(first[3]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", first[3])
    bench.close()

    engine_end = Bench()
    vocabulary = engine_end.engine.vocabulary
    object.__setattr__(vocabulary, "end_tokens", frozenset({first[3]}))
    engine_end.engine.add(prompt(10), SamplingParams(max_new_tokens=12), request_id="a")
    engine_end.engine.add(prompt(10), GREEDY, request_id="b")
    outputs = finish(engine_end)
    assert (outputs["a"].token_ids, outputs["b"].token_ids) == (output.token_ids, first)
    engine_end.close()


def test_a_stop_string_ends_an_answer_and_is_not_in_its_text(bench: Bench) -> None:
    bench.engine.add(prompt(10), GREEDY, request_id="free")
    free = finish(bench)["free"]
    stop = free.text[4:6]
    bench.engine.add(prompt(10), SamplingParams(max_new_tokens=12, ignore_eos=True, stop=stop), request_id="a")
    chunks = run(bench)
    output = chunks[-1].output
    assert output is not None
    assert output.text == free.text[: free.text.index(stop)] == "".join(chunk.text for chunk in chunks)
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_text_is_what_was_streamed_and_length_is_exact(bench: Bench) -> None:
    bench.engine.add(prompt(10), SAMPLED, request_id="a")
    chunks = run(bench)
    output = chunks[-1].output
    assert output is not None
    assert output.text == "".join(chunk.text for chunk in chunks)
    assert output.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (12, "length", None)


def test_logprobs_come_with_every_token(bench: Bench) -> None:
    bench.engine.add(prompt(10), SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2), request_id="a")
    chunks = run(bench)
    output = chunks[-1].output
    assert output is not None
    assert output.logprobs is not None
    assert output.logprobs == tuple(entry for chunk in chunks for entry in chunk.logprobs)
    assert tuple(entry.token_id for entry in output.logprobs) == output.token_ids
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in output.logprobs)
    assert all(len(entry.top) == 2 and entry.logprob < 0 for entry in output.logprobs)


def test_penalties_act_over_a_whole_answer(bench: Bench) -> None:
    never_twice = SamplingParams(max_new_tokens=40, ignore_eos=True, repetition_penalty=1e9)
    bench.engine.add(prompt(10), never_twice, request_id="a")
    tokens = finish(bench)["a"].token_ids
    assert len({*tokens, *prompt(10)}) == 40 + len(set(prompt(10)))


# --- progress, time, figures


def test_progress_and_time_to_first_token() -> None:
    bench = Bench(max_step_tokens=16)
    bench.engine.add(prompt(40), SamplingParams(max_new_tokens=2, ignore_eos=True), request_id="a")
    chunks = []
    while bench.engine.has_work:
        bench.now_s += 0.5
        chunks += bench.engine.step()
    assert [chunk.prefill for chunk in chunks] == [(16, 40), (32, 40), (40, 40), None]
    output = chunks[-1].output
    assert output is not None
    assert output.usage.ttft_s == 1.5
    stats = bench.engine.stats()
    assert (stats.num_steps, stats.prefill_tokens, stats.decode_tokens, stats.prompt_tokens) == (4, 40, 1, 40)
    assert (stats.num_added, stats.num_finished, stats.num_running, stats.num_waiting) == (1, 1, 0, 0)
    bench.close()


# --- cancelling


def test_cancel_frees_blocks_at_once_and_keeps_what_is_full(bench: Bench) -> None:
    bench.engine.add(prompt(90), GREEDY, request_id="a")
    bench.engine.add(prompt(40, 1), GREEDY, request_id="b")
    bench.engine.step()
    output = bench.engine.cancel("a")
    assert output is not None
    assert (output.finish_reason, len(output.token_ids), output.usage.new_tokens) == ("cancelled", 1, 1)
    assert bench.num_used_blocks == 3
    assert bench.cache.match([*prompt(90), 0]).num_tokens == 90
    assert bench.engine.cancel("a") is None
    assert set(finish(bench)) == {"b"}
    assert bench.engine.stats().num_cancelled == 1


def test_a_prefill_cancelled_in_the_middle_keeps_its_full_blocks() -> None:
    bench = Bench(max_step_tokens=20, kv="int8")
    bench.engine.add(prompt(90), GREEDY, request_id="a")
    bench.engine.step()
    bench.engine.step()
    output = bench.engine.cancel("a")
    assert output is not None
    assert (output.text, output.token_ids, output.usage.ttft_s) == ("", (), None)
    assert bench.num_used_blocks == 0
    assert bench.cache.match(prompt(90)).num_tokens == 32
    bench.check_integrity()
    bench.close()


def test_a_waiting_request_and_all_answers_of_one_can_be_cancelled() -> None:
    bench = Bench(max_num_sequences=2)
    bench.engine.add(prompt(20), SamplingParams(max_new_tokens=9, n=3, ignore_eos=True), request_id="a")
    bench.engine.add(prompt(30), GREEDY, request_id="b")
    bench.engine.step()  # two answers run, one waits, and so does b
    for name in ("b", "a"):
        assert bench.engine.cancel(name) is not None
        bench.check_integrity()
    assert not bench.engine.has_work
    assert bench.num_used_blocks == 0
    bench.close()


# --- what is refused


def refusal(bench: Bench, ids: list[int], params: SamplingParams | None = None) -> KTransformerError:
    with pytest.raises(KTransformerError) as caught:
        bench.engine.add(ids, params)
    assert not bench.engine.has_work
    assert bench.engine.stats().num_refused == 1
    return caught.value


def test_an_empty_prompt_is_refused(bench: Bench) -> None:
    assert isinstance(refusal(bench, []), EmptyPromptError)


def test_an_over_long_prompt_is_refused_in_numbers() -> None:
    bench = Bench(max_positions=100)
    error = refusal(bench, prompt(90), SamplingParams(max_new_tokens=11))
    assert isinstance(error, ContextLengthError)
    assert str(error) == (
        "a prompt of 90 tokens and a reserve of 11 for the answer (max_new_tokens) are 101 tokens; the model's maximum "
        "is 100. Nothing was truncated: the longest prompt with this reserve is 89 tokens"
    )
    bench.engine.add(prompt(90), SamplingParams(max_new_tokens=10, ignore_eos=True), request_id="a")
    assert len(finish(bench)["a"].token_ids) == 10
    bench.close()


def test_a_maximum_that_comes_from_the_rotation_says_so() -> None:
    bench = Bench()
    longrope = "longrope: its frequencies switch with the length of the text"
    bench.model.geometry = replace(bench.model.geometry, max_positions=100, shift_refused=longrope)
    admission = Admission(bench.model, bench.cache, Vocabulary(), EngineConfig())
    with pytest.raises(
        ContextLengthError, match=rf"maximum is 100, and its positions cannot be moved \({longrope}\)\. Nothing"
    ):
        admission.check(prompt(90), SamplingParams(max_new_tokens=11))
    bench.close()


def test_the_default_reserve_counts() -> None:
    bench = Bench(max_positions=100, max_new_tokens=50)
    assert "a reserve of 50" in str(refusal(bench, prompt(51)))
    bench.close()


def test_a_reserve_beyond_the_context_says_what_to_lower() -> None:
    bench = Bench(max_positions=100)
    assert str(refusal(bench, prompt(1), SamplingParams(max_new_tokens=100))).endswith("lower max_new_tokens")
    bench.close()


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_memory_that_cannot_hold_a_request_is_named_in_numbers(kv: str) -> None:
    bench = Bench(num_blocks=4, kv=kv)
    chunk = bench.engine.config.max_step_tokens
    capacity = bench.cache.capacity_tokens(chunk)
    error = refusal(bench, prompt(capacity - 4), SamplingParams(max_new_tokens=5))
    assert isinstance(error, OutOfMemoryError)
    need, have = (
        format_bytes(n) for n in (bench.cache.bytes_for(capacity + 1, chunk), bench.cache.config.memory_bytes)
    )
    int8 = ", or hold keys and values in int8 (kv='int8')" if kv == "full" else ""
    assert str(error) == (
        f"a prompt of {capacity - 4} tokens and a reserve of 5 for the answer need {capacity + 1} tokens in the cache, "
        f"which are {need}; the memory limit of {have} holds {capacity}. The longest prompt that fits "
        f"with this reserve is {capacity - 5} tokens. Raise memory=, lower max_new_tokens{int8}; "
        "`ktransformer plan` says beforehand what fits"
    )
    bench.engine.add(prompt(capacity - 5), SamplingParams(max_new_tokens=5, ignore_eos=True), request_id="a")
    assert len(finish(bench)["a"].token_ids) == 5  # the longest that was named does fit
    bench.close()


def test_a_token_outside_the_vocabulary_is_refused(bench: Bench) -> None:
    error = refusal(bench, [1, 2, VOCAB_SIZE])
    assert isinstance(error, RequestError)
    assert str(error) == (
        f"token id {VOCAB_SIZE} at place 2 of the prompt is not in the model's vocabulary; "
        f"allowed: 0 to {VOCAB_SIZE - 1}"
    )


def test_a_prompt_of_something_else_than_token_ids_is_refused(bench: Bench) -> None:
    words: Any = ["one", "two"]
    assert isinstance(refusal(bench, words), RequestError)


def test_the_queue_is_bounded() -> None:
    bench = Bench(max_queued_requests=2)
    for _ in range(2):
        bench.engine.add(prompt(5), GREEDY)
    with pytest.raises(QueueFullError, match=re.escape("2 requests wait, max_queued_requests=2 are allowed")):
        bench.engine.add(prompt(5), GREEDY)
    bench.engine.step()
    bench.engine.add(prompt(5), GREEDY)
    assert len(finish(bench)) == 3
    bench.close()


def test_a_request_id_is_used_once_at_a_time(bench: Bench) -> None:
    bench.engine.add(prompt(5), GREEDY, request_id="a")
    with pytest.raises(RequestError, match="request_id='a' is taken"):
        bench.engine.add(prompt(5), GREEDY, request_id="a")
    run(bench)
    bench.engine.add(prompt(5), GREEDY, request_id="a")
    run(bench)


def test_stop_strings_need_a_tokenizer() -> None:
    bench = Bench()
    engine = Engine(bench.model, bench.cache)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.add(prompt(5), SamplingParams(stop="x"))
    engine.add(prompt(5), SamplingParams(max_new_tokens=2, ignore_eos=True))
    while engine.has_work:
        chunks = engine.step()
    assert chunks[-1].output is not None
    assert (chunks[-1].output.text, len(chunks[-1].output.token_ids)) == ("", 2)
    bench.close()


# --- what goes wrong on the way


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_not_finite_logits_end_one_request_and_publish_nothing(kv: str) -> None:
    bench = Bench(kv=kv, max_step_tokens=64)
    poisoned = [*prompt(40), POISON, *prompt(50, 2)]
    bench.engine.add(prompt(20, 1), GREEDY, request_id="good")
    bench.engine.add(poisoned, GREEDY, request_id="bad")
    outputs = finish(bench)
    assert outputs["good"].token_ids == answer_alone(prompt(20, 1), GREEDY)
    bad = outputs["bad"]
    assert isinstance(bad.error, NumericsError)
    assert "token 43 of request bad" in str(bad.error)  # 20 of the 64 were the other one's
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    # Not even the rows before the poison: they were of the same step.
    assert bench.cache.match(poisoned).num_tokens == 0
    assert bench.num_used_blocks == 0
    assert (bench.engine.stats().num_failed, bench.engine.stats().num_finished) == (1, 1)
    bench.close()


def test_chunks_before_the_one_that_failed_stay_cached() -> None:
    bench = Bench(max_step_tokens=32, kv="int8")
    poisoned = [*prompt(40), POISON, *prompt(50, 2)]
    bench.engine.add(poisoned, GREEDY, request_id="bad")
    assert finish(bench)["bad"].finish_reason == "error"
    assert bench.cache.match(poisoned).num_tokens == 32
    bench.close()


def test_a_failing_step_loses_nothing(bench: Bench) -> None:
    bench.engine.add(prompt(40), GREEDY, request_id="a")
    bench.engine.step()
    bench.engine.add(prompt(20, 1), GREEDY, request_id="b")
    bench.model.fail_next = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        bench.engine.step()
    bench.check_integrity()
    outputs = finish(bench)
    assert outputs["a"].token_ids == answer_alone(prompt(40), GREEDY)
    assert outputs["b"].token_ids == answer_alone(prompt(20, 1), GREEDY)


def test_a_closed_engine_says_so_and_leaves_nothing() -> None:
    bench = Bench()
    bench.engine.add(prompt(40), GREEDY)
    bench.engine.step()
    bench.engine.close()
    bench.engine.close()
    assert bench.num_used_blocks == 0
    with pytest.raises(EngineClosedError):
        bench.engine.step()
    with pytest.raises(EngineClosedError):
        bench.engine.add(prompt(5))
    bench.cache.close()


def _outcome(bench: Bench) -> list[str]:
    """What a foreign caller meets, and that it changed nothing."""
    met = []
    for call in (
        bench.engine.step,
        lambda: bench.engine.add(prompt(5)),
        lambda: bench.engine.cancel("a"),
        bench.engine.close,
    ):
        try:
            call()
        except OwnershipError as error:
            met.append(str(error).split(" was used from ")[1].split(";")[0])
    return met


def test_a_second_thread_is_refused(bench: Bench) -> None:
    bench.engine.add(prompt(5), GREEDY, request_id="a")
    met: list[str] = []
    thread = threading.Thread(target=lambda: met.extend(_outcome(bench)))
    thread.start()
    thread.join()
    assert met == ["a second thread"] * 4
    assert set(finish(bench)) == {"a"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_after_fork_is_refused(bench: Bench) -> None:
    bench.engine.add(prompt(5), GREEDY, request_id="a")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(_outcome(bench)))
    child.start()
    assert receiver.poll(20)
    assert receiver.recv() == ["a child process after fork"] * 4
    child.join()
    assert set(finish(bench)) == {"a"}


def test_an_engine_without_work_steps_in_vain(bench: Bench) -> None:
    assert bench.engine.step() == []
    assert TinyModel().batches == bench.model.batches == []
