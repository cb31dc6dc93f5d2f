"""Chats and completions, as the official client has them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.serving import BLOCK, Served

ASK: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered_with_usage_that_says_what_was_cached(server: Served) -> None:
    asked = user("What does the tenant pay? " * 4)
    first = server.openai.chat.completions.create(messages=asked, max_tokens=8, **ASK)
    again = server.openai.chat.completions.create(messages=asked, max_tokens=8, **ASK)
    assert first.object == "chat.completion"
    assert first.choices[0].finish_reason == "length"
    assert first.choices[0].message.content == again.choices[0].message.content
    num_prompt = len("user: \nassistant: ") + len(asked[0]["content"])
    for answer, cached in ((first, 0), (again, num_prompt - 1)):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 8)
        assert answer.usage.prompt_tokens_details.cached_tokens == cached
    extra = (again.model_extra or {})["ktransformer"]
    assert extra["cached_by_tier"] == {"memory": num_prompt - 1}
    assert (extra["truncated"], extra["approximate"], extra["miss"]) == (False, False, ["found"])


def test_cached_tokens_are_those_that_the_engine_did_not_compute(server: Served) -> None:
    asked = user("Counted twice, computed once. " * 3)
    server.openai.chat.completions.create(messages=asked, max_tokens=2, **ASK)
    before = server.engine.stats
    usage = server.openai.chat.completions.create(messages=asked, max_tokens=2, **ASK).usage
    server.rests()
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    computed = server.engine.stats.prefill_tokens - before.prefill_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - computed


def test_a_stream_has_a_role_the_text_of_the_whole_answer_usage_and_an_end(server: Served) -> None:
    asked = user("Stream this")
    whole = server.openai.chat.completions.create(messages=asked, max_tokens=12, **ASK)
    stream = server.openai.chat.completions.create(
        messages=asked, max_tokens=12, stream=True, stream_options={"include_usage": True}, **ASK
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1


def test_the_bytes_of_a_stream(server: Served) -> None:
    body = {"model": "tiny", "messages": user("x"), "max_tokens": 3, "temperature": 0, "stream": True}
    body |= {"return_progress": True, "cache_salt": "nothing cached"}
    with server.http.stream("POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"}) as answer:
        text = answer.read().decode()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == "mine-1"
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert parsed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    progress = [event["prompt_progress"] for event in parsed if "prompt_progress" in event]
    total = len("user: x\nassistant: ")
    assert [(p["total"], p["processed"], p["cache"]) for p in progress] == [(total, total, 0)]
    assert not any("usage" in event for event in parsed)


def test_several_answers_differ_and_a_seed_repeats_them(server: Served) -> None:
    def texts() -> list[str | None]:
        answer = server.openai.chat.completions.create(
            model="tiny", messages=user("Differ"), n=3, seed=7, max_tokens=12, temperature=1.0
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_several_answers_stream_side_by_side(server: Served) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": user("Side by side"), "n": 2, "seed": 3, "max_tokens": 6}
    whole = server.openai.chat.completions.create(**ask)
    texts = ["", ""]
    for chunk in server.openai.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_log_probabilities_of_a_chat(server: Served) -> None:
    ask: dict[str, Any] = {**ASK, "messages": user("Likely?"), "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    answer = server.openai.chat.completions.create(**ask)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    for place in content:
        assert place.top_logprobs[0].token == place.token  # greedy
        assert len(place.top_logprobs) == 3
        assert place.logprob == place.top_logprobs[0].logprob <= 0
    streamed = [
        place.token
        for chunk in server.openai.chat.completions.create(**ask, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for place in choice.logprobs.content or []
    ]
    assert streamed == [place.token for place in content]


def test_a_stop_string_ends_the_answer_before_it(server: Served) -> None:
    whole = server.openai.completions.create(prompt="stop where", max_tokens=40, **ASK).choices[0].text
    stop = whole[5:8]
    cut = server.openai.completions.create(prompt="stop where", max_tokens=40, stop=stop, **ASK).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_completions_take_several_prompts_texts_or_ids(server: Served) -> None:
    together = server.openai.completions.create(prompt=["ab", "cd"], n=1, max_tokens=5, **ASK)
    ids = server.http.post("/tokenize", json={"prompt": "cd"}).json()["tokens"]
    alone = server.openai.completions.create(prompt=ids, max_tokens=5, **ASK)
    assert [choice.index for choice in together.choices] == [0, 1]
    assert together.choices[1].text == alone.choices[0].text
    assert together.usage is not None
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (4, 10)


def test_log_probabilities_of_a_completion(server: Served) -> None:
    ask: dict[str, Any] = {**ASK, "prompt": "text", "max_tokens": 4, "logprobs": 2}
    found = server.openai.completions.create(**ask).choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(4)]
    chunks = server.openai.completions.create(**ask, stream=True)
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert [offset for each in streamed for offset in each.text_offset or []] == found.text_offset
    values = [value for each in streamed for value in each.token_logprobs or []]
    assert values == pytest.approx(found.token_logprobs, abs=1e-4)


def test_a_logit_bias_forces_and_forbids_a_token(server: Served) -> None:
    (token,) = server.http.post("/tokenize", json={"content": "q"}).json()["tokens"]
    forced = server.openai.completions.create(prompt="p", max_tokens=4, logit_bias={str(token): 100}, **ASK)
    assert forced.choices[0].text == "qqqq"


def test_the_second_turn_reuses_every_block_of_the_first(server: Served) -> None:
    turns = user("The first question, which is long enough for some blocks of sixteen tokens.")
    letters = server.http.post("/tokenize", json={"content": "abcde"}).json()["tokens"]
    ascii_only = {str(token): 100 for token in letters}  # so that its text has the same tokens when it is read again
    first = server.openai.chat.completions.create(messages=turns, max_tokens=40, logit_bias=ascii_only, **ASK)
    text = first.choices[0].message.content or ""
    assert first.usage is not None
    turns = [*turns, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    second = server.openai.chat.completions.create(messages=turns, max_tokens=4, **ASK).usage
    assert second is not None
    assert second.prompt_tokens_details is not None
    # All but the last token of the answer was computed, and it is read again as the template writes it.
    written = first.usage.total_tokens - 1
    assert second.prompt_tokens_details.cached_tokens is not None
    assert second.prompt_tokens_details.cached_tokens >= written // BLOCK * BLOCK


def test_a_field_that_is_not_known_is_named_and_does_no_harm(server: Served) -> None:
    body = {"model": "alias", "messages": user("x"), "max_tokens": 1, "prompt_cache_key": "k", "wibble": 1}
    found = server.http.post("/v1/chat/completions", json=body).json()
    assert found["ktransformer"]["ignored_fields"] == ["prompt_cache_key", "wibble"]
    assert found["model"] == "tiny"


def test_a_salt_of_the_client_keeps_prefixes_apart(server: Served) -> None:
    def cached(salt: str) -> int:
        body = {"model": "tiny", "prompt": "salted " * 10, "max_tokens": 1, "cache_salt": salt}
        found: int = server.http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        return found

    assert [cached("a"), cached("b"), cached("a")] == [0, 0, 69]


def test_content_may_come_in_parts_and_from_a_developer(server: Served) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]}]
    rendered = server.http.post("/apply-template", json={"messages": [{"role": "developer", "content": "Hi"}, *parts]})
    assert rendered.json() == {"prompt": "system: Hi\nuser: Hello\nassistant: "}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_with_numbers(server: Served, stream: bool) -> None:
    (model,) = [m for m in server.openai.models.list().data if m.id == "tiny"]
    longest = (model.model_extra or {})["max_model_len"]
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(messages=user("x" * longest), max_tokens=10, stream=stream, **ASK)
    assert caught.value.code == "context_length_exceeded"
    assert str(longest) in str(caught.value.message)
