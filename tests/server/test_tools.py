"""JSON schemas, tools and reasoning: constraints that hold, and what clients read."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from ktransformer2.engine.llm import LLM
from ktransformer2.models.loading import LoadedModel
from ktransformer2.server.grammar import Grammars
from ktransformer2.server.problems import ApiError
from ktransformer2.server.tools import Tools, with_arguments
from tests.server.serving import Served, opened, served

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: dict[str, Any] = WEATHER["function"]["parameters"]
ASKED: Any = [{"role": "user", "content": "How is it?"}]


def test_an_answer_keeps_to_a_schema(server: Served) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    answer = server.openai.chat.completions.create(
        model="tiny", messages=ASKED, n=4, temperature=1.5, seed=1, max_tokens=60, response_format=form
    )
    for choice in answer.choices:
        found = json.loads(choice.message.content or "")
        assert set(found) == {"city", "days"}
        assert found["city"] in ("Rome", "Oslo")
        assert 1 <= found["days"] <= 9
        assert choice.finish_reason == "stop"


def test_a_schema_that_is_none_is_refused(server: Served) -> None:
    for schema in ({"type": "nonsense"}, {"description": "x" * 70_000}):
        form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as caught:
            server.openai.chat.completions.create(model="tiny", messages=ASKED, response_format=form)
        assert caught.value.param == "response_format"


def test_a_tool_that_must_be_called_is_called(server: Served) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": [WEATHER], "max_tokens": 80, "seed": 2}
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
    for choice in choices:
        answer = server.openai.chat.completions.create(**ask, tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
    deltas = [
        chunk.choices[0]
        for chunk in server.openai.chat.completions.create(**ask, tool_choice="required", stream=True)
        if chunk.choices
    ]
    (called,) = [each.delta.tool_calls for each in deltas if each.delta.tool_calls]
    assert called[0].index == 0
    assert called[0].function is not None
    assert called[0].function.name == "weather"
    assert set(json.loads(called[0].function.arguments or "")) == {"city", "days"}
    assert deltas[-1].finish_reason == "tool_calls"


def test_a_template_without_tools_gets_them_in_words(server: Served) -> None:
    messages: Any = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"days": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    said = Tools.of([WEATHER], "auto", 10_000).in_words(with_arguments([{"content": None, **m} for m in messages]))
    assert said[0]["content"].startswith("Be kind.\n\nYou may call functions.")
    assert json.dumps(WEATHER["function"]) in said[0]["content"]
    assert said[2]["content"] == '<tool_call>{"name": "weather", "arguments": {"days": 1}}</tool_call>'
    assert said[3] == {"role": "user", "content": "<tool_response>sunny</tool_response>"}
    answer = server.openai.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > len(json.dumps(WEATHER["function"]))


def test_what_is_no_tool_and_no_choice_is_refused() -> None:
    cases: list[tuple[Any, Any]] = [([{"type": "web"}], None), ([WEATHER], "always"), ([WEATHER], {"name": "x"})]
    for tools, choice in [*cases, ([], "required")]:
        with pytest.raises(ApiError):
            Tools.of(tools, choice, 10_000)
    with pytest.raises(ApiError, match="larger than 100 bytes"):
        Tools.of([WEATHER], None, 100)
    with pytest.raises(ApiError, match="a JSON object in a text"):
        with_arguments([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])
    assert Tools.of([WEATHER], "none", 10_000) == Tools()


def test_a_grammar_allows_what_can_follow_and_then_the_end(loaded: LoadedModel) -> None:
    end = loaded.tokenizer.eos_token_id
    make = Grammars(loaded.tokenizer, frozenset({end})).json_schema({"enum": ["ab", "ac"]})
    grammar, other = make(), make()

    def allowed() -> set[int]:
        return set(grammar.allowed(300).nonzero()[:, 0].tolist())

    for text in '"a':
        (token,) = loaded.tokenizer.encode(text)
        assert allowed() == {token}
        grammar.observe(token)
    assert allowed() == {loaded.tokenizer.encode(text)[0] for text in "bc"}
    for text in 'b"':
        grammar.observe(loaded.tokenizer.encode(text)[0])
    assert allowed() == {end}
    grammar.observe(end)
    assert allowed() == {end}
    assert int(other.allowed(300).sum()) == 1  # answers go their own ways
    assert grammar.allowed(300).dtype is torch.bool


@pytest.fixture(scope="module")
def thinking(loaded: LoadedModel) -> Iterator[Served]:
    """Its prompts end inside a thought, which a bias makes short."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = str(tokenizer.chat_template) + "{{ '<think>' }}"

    def open_llm() -> LLM:
        return opened(dataclasses.replace(loaded, tokenizer=tokenizer))

    with served(open_llm) as found:
        yield found


def test_reasoning_stands_under_both_names(thinking: Served) -> None:
    ask = {"model": "tiny", "messages": ASKED, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    message = thinking.http.post("/v1/chat/completions", json=ask).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert message["content"] == ""
    streamed: Any = thinking.openai.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=5, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    deltas = [choice.delta.model_dump() for chunk in streamed for choice in chunk.choices]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning"]
