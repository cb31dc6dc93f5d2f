"""Reasoning, content and calls out of a text, wherever its pieces end."""

from __future__ import annotations

import itertools

import pytest

from ktransformer2.server.answer_reader import AnswerReader, Part

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def read(
    pieces: list[str], *, thinks: bool = False, tools: bool = True, forced: bool = False
) -> list[tuple[str, str, str]]:
    """Parts, with neighbours of one kind put together."""
    reader = AnswerReader(thinks=thinks, tools=tools, forced=forced)
    parts: list[Part] = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    joined: list[tuple[str, str, str]] = []
    for kind, group in itertools.groupby(parts, key=lambda part: (part.kind, part.kind == "call" and id(part))):
        same = list(group)
        joined.append((kind[0], "".join(part.text for part in same), same[0].name))
    return joined


WHOLE = {
    "plain": ("a < b <tool", [("content", "a < b <tool", "")]),
    "thinks": ("<think>why</think>so", [("reasoning", "why", ""), ("content", "so", "")]),
    "call": (f"first {CALL}", [("content", "first ", ""), ("call", '{"x": 1}', "f")]),
    "two calls": (CALL + CALL, [("call", '{"x": 1}', "f"), ("call", '{"x": 1}', "f")]),
    "all": (f"<think>t</think>{CALL}", [("reasoning", "t", ""), ("call", '{"x": 1}', "f")]),
    "no JSON": ("<tool_call>f(1)</tool_call>", [("content", "<tool_call>f(1)</tool_call>", "")]),
    "broken off": ('<tool_call>{"name"', [("content", '<tool_call>{"name"', "")]),
    "late thought": ("so <think>x</think>", [("content", "so <think>x</think>", "")]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_text_is_read_alike_however_it_comes(name: str) -> None:
    text, expected = WHOLE[name]
    assert read([text]) == expected
    assert read(list(text)) == expected


def test_a_prompt_may_end_inside_a_thought() -> None:
    assert read(["x</th", "ink>y"], thinks=True) == [("reasoning", "x", ""), ("content", "y", "")]


def test_without_tools_a_call_is_text() -> None:
    assert read([CALL], tools=False) == [("content", CALL, "")]


def test_a_forced_answer_is_one_call() -> None:
    assert read(['{"name": "f", ', '"arguments": {}}'], forced=True) == [("call", "{}", "f")]
    assert read(['{"name": "f", '], forced=True) == [("content", '{"name": "f", ', "")]


def test_nothing_of_a_tag_is_given_out_early() -> None:
    reader = AnswerReader(tools=True)
    assert reader.push("text <tool_ca") == [Part("content", "text ")]
    assert reader.push("ke") == [Part("content", "<tool_cake")]
