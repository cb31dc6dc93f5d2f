"""Conversations that the server remembers, as the official client has them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ktransformer2.server.conversations import Conversations, Said, continued
from ktransformer2.server.problems import ApiError
from tests.server.serving import BLOCK, Served
from tests.server.test_tools import WEATHER

ASK: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_a_second_turn_goes_on_from_the_first_and_finds_its_blocks(server: Served) -> None:
    letters = server.http.post("/tokenize", json={"content": "abcde"}).json()["tokens"]
    ask = {**ASK, "extra_body": {"ignore_eos": True, "logit_bias": {str(token): 100 for token in letters}}}
    first = server.openai.responses.create(input="Remember the number forty-two, please.", max_output_tokens=30, **ask)
    assert (first.status, first.incomplete_details and first.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert len(first.output_text) == 30
    second = server.openai.responses.create(
        input="Which one was it?", previous_response_id=first.id, max_output_tokens=4, **ask
    )
    assert first.usage is not None
    assert second.usage is not None
    whole = f"user: Remember the number forty-two, please.\nassistant: {first.output_text}\nuser: Which one was it?\n"
    assert second.usage.input_tokens == len(whole + "assistant: ")
    found = second.usage.input_tokens_details
    assert found.cached_tokens >= (first.usage.total_tokens - 1) // BLOCK * BLOCK
    assert found.cache_write_tokens == second.usage.input_tokens - found.cached_tokens
    assert second.previous_response_id == first.id


def test_a_stream_of_events_ends_with_the_response_that_is_kept(server: Served) -> None:
    events = list(server.openai.responses.create(input="Events", max_output_tokens=6, stream=True, **ASK))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = server.openai.responses.create(input="Events", max_output_tokens=6, **ASK)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    (last,) = [event for event in events if event.type == "response.incomplete"]
    assert server.openai.responses.retrieve(last.response.id).output_text == text


def test_a_call_of_a_tool_and_its_result(server: Served) -> None:
    tool: Any = {"type": "function", "strict": None, **WEATHER["function"]}
    first = server.openai.responses.create(
        model="tiny", input="Rome?", tools=[tool], tool_choice="required", max_output_tokens=80
    )
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("weather", "completed")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = server.openai.responses.create(
        model="tiny", input=[result], tools=[tool], previous_response_id=first.id, max_output_tokens=2
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + len(call.arguments)
    events = server.openai.responses.create(
        model="tiny", input="Rome?", tools=[tool], tool_choice="required", max_output_tokens=80, stream=True
    )
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert set(json.loads(done.arguments)) == {"city", "days"}


def test_what_is_not_stored_or_deleted_is_not_found(server: Served) -> None:
    unkept = server.openai.responses.create(input="x", max_output_tokens=1, store=False, **ASK)
    kept = server.openai.responses.create(input="x", max_output_tokens=1, **ASK)
    server.openai.responses.delete(kept.id)
    for each in (unkept, kept):
        with pytest.raises(openai.NotFoundError) as caught:
            server.openai.responses.create(input="y", previous_response_id=each.id, **ASK)
        assert caught.value.code == "response_not_found"


def test_truncation_is_refused_and_so_are_items_that_are_not_known(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="truncation is not served"):
        server.openai.responses.create(input="x", truncation="auto", **ASK)
    image: Any = [{"type": "computer_call"}]
    with pytest.raises(openai.BadRequestError, match="'computer_call' are not served"):
        server.openai.responses.create(input=image, **ASK)


def said(caller: str, num_tokens: int, answer: tuple[int, ...] = ()) -> Said:
    return Said(caller, (), tuple(range(num_tokens - len(answer))), answer, {})


def test_conversations_leave_in_the_order_of_their_last_use_and_are_their_callers() -> None:
    kept = Conversations(100)
    for name in ("a", "b"):
        kept.keep(name, said("anna", 40))
    kept.find("a", "anna")
    with pytest.raises(ApiError):
        kept.find("a", "bert")
    kept.keep("c", said("anna", 40))
    with pytest.raises(ApiError):
        kept.find("b", "anna")
    kept.keep("too large", said("anna", 101))  # drives nobody out
    with pytest.raises(ApiError):
        kept.find("too large", "anna")
    for name in ("a", "c"):
        assert kept.find(name, "anna").num_tokens == 40
    kept.keep("d", said("anna", 100))
    for name in ("a", "c"):
        with pytest.raises(ApiError):
            kept.find(name, "anna")
    kept.forget("d", "anna")
    kept.keep("e", said("anna", 100))
    assert kept.find("e", "anna").num_tokens == 100


def test_an_answer_keeps_its_own_tokens_where_the_text_is_the_same() -> None:
    texts = {10: "a", 11: "b", 12: "ab", 13: "!", 14: "ab!"}

    def text(ids: list[int]) -> str:
        return "".join(texts[token] for token in ids)

    before = said("anna", 3, (10, 11))  # prompt 0; then a, b
    assert continued([0, 12, 13, 10], before, text) == [0, 10, 11, 13, 10]
    assert continued([0, 10, 11, 13], before, text) == [0, 10, 11, 13]
    assert continued([0, 14, 13], before, text) == [0, 14, 13]  # a token across the end of the answer
    assert continued([5, 12, 13], before, text) == [5, 12, 13]  # the template rewrote what came before
    assert continued([0], before, text) == [0]
