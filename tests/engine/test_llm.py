"""The front door, on a small random Llama served through transformers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformer2.engine.llm import LLM
from ktransformer2.engine.prompts import Prompt
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import (
    ConfigError,
    ContextLengthError,
    EmptyPromptError,
    EngineClosedError,
    ModelNotFoundError,
    NumericsError,
    RequestError,
)
from ktransformer2.models.demo import random_model
from ktransformer2.models.loading import LoadedModel

TEXT = "The tenant shall pay the rent in advance. 租金应于每月五日前支付。"
SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_model("float32")


@pytest.fixture
def llm(loaded: LoadedModel) -> Iterator[LLM]:
    with LLM(loaded, kv="full", memory="64MB", block_tokens=16) as made:
        yield made
        made.engine.check_integrity()
        made.cache.check_integrity()


def reference(loaded: LoadedModel, ids: list[int], num_tokens: int) -> list[int]:
    with loaded.model.original_attention() as model, torch.inference_mode():
        out: list[int] = model.generate(  # type: ignore[operator]  # transformers types it as a tensor's attribute
            torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )[0].tolist()
    return out[len(ids) :]


def used_blocks(llm: LLM) -> int:
    stats = llm.cache.stats()
    return stats.num_blocks - stats.num_cached_blocks


def test_a_batch_answers_as_transformers_does(loaded: LoadedModel, llm: LLM) -> None:
    texts = [TEXT, TEXT[:7], TEXT * 3, "x"]
    outputs = llm.generate(texts, dataclasses.replace(SHORT, max_new_tokens=16))
    for text, output in zip(texts, outputs, strict=True):
        assert list(output.token_ids) == reference(loaded, llm.tokenizer.encode(text), 16)


def test_a_stream_gives_progress_then_the_text_of_generate(llm: LLM) -> None:
    (expected,) = llm.generate(TEXT, SHORT)
    chunks = list(llm.stream(TEXT, SHORT))
    num_tokens = len(TEXT.encode())
    assert chunks[0].prefill == (num_tokens, num_tokens)
    assert "".join(chunk.text for chunk in chunks) == expected.text
    output = chunks[-1].output
    assert output is not None
    assert (output.token_ids, output.finish_reason) == (expected.token_ids, "length")
    assert (expected.usage.cached_tokens, output.usage.cached_tokens) == (0, num_tokens - 1)
    assert output.usage.ttft_s is not None


def test_prompts_may_be_text_or_token_ids_one_or_many(llm: LLM) -> None:
    ids = llm.tokenizer.encode("ab")
    expected = llm.generate("ab", SHORT)[0].token_ids
    assert [output.token_ids for output in llm.generate(ids, SHORT)] == [expected]
    both: list[Prompt] = [ids, "ab"]
    assert [output.token_ids for output in llm.generate(both, SHORT)] == [expected] * 2
    mixed: Any = [1, "ab"]
    with pytest.raises(RequestError, match="prompts mix token ids and prompts"):
        llm.generate(mixed, SHORT)


def test_parameters_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    lengths = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (2, 5)]
    assert [len(output.token_ids) for output in llm.generate(["a", "b"], lengths)] == [2, 5]
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", lengths)


def test_more_prompts_than_the_queue_holds_are_all_answered(loaded: LoadedModel) -> None:
    with LLM(loaded, memory="64MB", max_queued_requests=2, max_num_sequences=2) as llm:
        outputs = llm.generate([f"prompt {i}" for i in range(9)], SamplingParams(max_new_tokens=2, ignore_eos=True))
        assert [len(output.token_ids) for output in outputs] == [2] * 9
        assert len({output.request_id for output in outputs}) == 9


def test_one_bad_prompt_is_refused_before_any_is_started(llm: LLM) -> None:
    with pytest.raises(EmptyPromptError):
        llm.generate(["good", ""], SHORT)
    nothings: list[Any] = [[], "", [[]], [""]]
    for nothing in nothings:
        with pytest.raises(EmptyPromptError, match="the prompt is empty"):
            llm.generate(nothing, SHORT)
    with pytest.raises(EmptyPromptError):
        llm.stream([])
    with pytest.raises(RequestError, match=r"'\\udcff' at place 1, which is no character; decode its bytes as UTF-8"):
        llm.generate(["good", "a\udcff"], SHORT)
    with pytest.raises(ContextLengthError, match="the model's maximum is 131072"):
        llm.stream("good", SamplingParams(max_new_tokens=131_072))
    assert llm.stats().num_steps == 0


def test_closing_a_stream_early_cancels_its_request(llm: LLM) -> None:
    stream = llm.stream(TEXT, SamplingParams(max_new_tokens=100, ignore_eos=True))
    next(stream)
    assert used_blocks(llm) > 0
    stream.close()
    assert used_blocks(llm) == 0
    assert not llm.engine.has_work
    assert llm.stats().num_cancelled == 1


def test_a_stream_that_is_never_read_starts_nothing(llm: LLM) -> None:
    llm.stream(TEXT, SHORT).close()
    assert llm.stats().num_added == 0


def test_streams_may_be_read_in_turns_and_beside_generate(llm: LLM) -> None:
    expected = {text: llm.generate(text, SHORT)[0].text for text in ("one", "two")}
    first, second = llm.stream("one", SHORT), llm.stream("two", SHORT)
    texts = [next(first).text, next(second).text]
    assert llm.generate("one", SHORT)[0].text == expected["one"]
    for one, two in itertools.zip_longest(first, second):
        texts[0] += one.text if one else ""
        texts[1] += two.text if two else ""
    assert texts == [expected["one"], expected["two"]]


def test_a_failing_step_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("one", SHORT)
    next(stream)
    monkeypatch.setattr(llm.engine._model, "forward", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate(["two", "three"], SHORT)
    assert llm.stats().num_running == 1
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert not llm.engine.has_work
    assert used_blocks(llm) == 0


def test_a_request_that_fails_is_an_output_of_generate_and_an_error_of_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine._model, "forward", lambda batch: torch.full((len(batch.logit_rows), 257), torch.nan))
    (output,) = llm.generate("one", SHORT)
    assert output.finish_reason == "error"
    assert isinstance(output.error, NumericsError)
    with pytest.raises(NumericsError):
        list(llm.stream("one", SHORT))


def test_chat_speaks_the_models_own_format_and_finds_the_turn_before(llm: LLM) -> None:
    messages = [{"role": "user", "content": TEXT}]
    prompt = f"user: {TEXT}\nassistant: "
    assert llm.chat(messages, SHORT).token_ids == llm.generate(prompt, SHORT)[0].token_ids
    assert "".join(chunk.text for chunk in llm.stream_chat(messages, SHORT)) == llm.chat(messages, SHORT).text
    again = llm.chat([*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}], SHORT)
    assert again.usage.cached_tokens == len(prompt.encode())


def test_chat_without_a_template_or_with_foreign_messages_is_refused(loaded: LoadedModel) -> None:
    plain = random_model("float32")
    plain.tokenizer.chat_template = None
    with LLM(plain, memory="64MB") as llm:
        with pytest.raises(RequestError, match="has no chat template; use generate"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(EmptyPromptError, match="the conversation is empty"):
            llm.stream_chat([])
    with LLM(loaded, memory="64MB") as llm, pytest.raises(RequestError, match="does not take these messages"):
        llm.chat([{"role": "user"}])


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]])
def test_a_conversation_that_ends_with_nothing_is_refused(llm: LLM, content: object) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": TEXT}, {"role": "user", "content": content}]
    for ask in (llm.chat, llm.stream_chat):
        with pytest.raises(EmptyPromptError, match="the last message is empty"):
            ask(messages, SHORT)
    assert llm.stats().num_added == 0


def test_messages_that_hold_no_text_or_are_none_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="is no character"):
        llm.chat([{"role": "user", "content": "\udcff"}], SHORT)
    wrong: Any = ["hi"]
    with pytest.raises(RequestError, match="a message is a mapping with a role and a content; got 'hi'"):
        llm.chat(wrong, SHORT)


def test_the_models_own_end_tokens_end_an_answer(loaded: LoadedModel, llm: LLM) -> None:
    end = loaded.tokenizer.eos_token_id
    assert llm.engine.vocabulary.end_tokens == {end}
    more = random_model("float32")
    assert more.model.model.generation_config is not None
    more.model.model.generation_config.eos_token_id = [3, 5]
    with LLM(more, memory="64MB") as other:
        assert other.engine.vocabulary.end_tokens == {end, 3, 5}


def test_settings_go_where_they_belong_and_unknown_ones_are_named(loaded: LoadedModel) -> None:
    with LLM(loaded, memory="64MB", kv="int8", max_step_tokens=99, defrag_interval_requests=7) as llm:
        assert llm.engine.config.max_step_tokens == 99
        config = llm.cache.config
        assert (config.kv, config.memory_bytes, config.block_tokens, config.defrag_interval_requests) == (
            "int8",
            64_000_000,
            64,
            7,
        )
    with pytest.raises(ConfigError, match="unknown setting 'max_step_token'; did you mean 'max_step_tokens'"):
        LLM(loaded, memory="64MB", max_step_token=1)
    with pytest.raises(ConfigError, match="block_tokens=100 is not allowed; allowed: 16, 32, 64, 128, 256"):
        LLM("never looked for", block_tokens=100)
    with pytest.raises(ConfigError, match="size 'much' is not understood"):
        LLM("never looked for", memory="much")


def test_auto_memory_is_bounded_by_what_the_model_can_use(loaded: LoadedModel) -> None:
    with LLM(loaded, max_num_sequences=1) as llm:
        per_token = 4 * 2 * 2 * 32 * 4  # layers, K and V, KV heads, head size, bytes
        assert 16 * 2**20 <= llm.cache.config.memory_bytes <= 2 * 131_072 * per_token


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path / "nothing here")


def test_after_close_there_is_one_clear_error(loaded: LoadedModel) -> None:
    llm = LLM(loaded, memory="64MB")
    stream = llm.stream("one", SHORT)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate("one")
    with pytest.raises(EngineClosedError):
        next(stream)
