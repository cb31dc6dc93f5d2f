"""The parts of an answer as its text arrives: reasoning, content, calls of tools. Pure; knows no model.

    <think> reasoning </think> content <tool_call> {"name": ..., "arguments": {...}} </tool_call>

The tags are those of Hermes and Qwen. Invariants: no part of a tag is ever given out as text; a call that is no JSON
object with a name is content, as it was written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from ktransformer2.engine.detokenizer import longest_beginning

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
Mode = Literal["content", "reasoning", "call", "forced"]
_BEHIND: dict[str, Mode] = {THINK: "reasoning", THINK_END: "content", CALL: "call"}


@dataclass(frozen=True)
class Part:
    """New text of a kind, or for `call` a whole call: `text` is its arguments as JSON."""

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""


class AnswerReader:
    """Reads one answer."""

    def __init__(self, *, thinks: bool = False, tools: bool = False, forced: bool = False) -> None:
        """`thinks`: the prompt ends inside the reasoning. `tools`: calls are looked for. `forced`: all is one call."""
        self._mode: Mode = "forced" if forced else "reasoning" if thinks else "content"
        self._tools = tools
        self._held = ""
        self._call = ""
        self._has_begun = False  # with something that is no space: reasoning comes first or not at all
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """What the new text settles."""
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        while hits := [(at, tag) for tag in self._tags() if (at := self._place(text, tag)) >= 0]:
            at, tag = min(hits)
            parts += self._take(text[:at])
            parts += self._turn(tag)
            text = text[at + len(tag) :]
        keep = max((longest_beginning(text, tag) for tag in self._tags()), default=0)
        self._held = text[len(text) - keep :]
        return parts + self._take(text[: len(text) - keep])

    def finish(self) -> list[Part]:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        parts = self._take(held)
        if self._mode == "call":
            parts.append(Part("content", CALL + self._call))
        elif self._mode == "forced" and self._call:
            parts.append(self._called(self._call, as_written=self._call))
        self._call = ""
        return parts

    def _tags(self) -> tuple[str, ...]:
        match self._mode:
            case "reasoning":
                return (THINK_END,)
            case "call":
                return (CALL_END,)
            case "forced":
                return ()
        return (() if self._has_begun else (THINK,)) + ((CALL,) if self._tools else ())

    def _place(self, text: str, tag: str) -> int:
        """Where a tag counts; -1: nowhere."""
        at = text.find(tag)
        return -1 if tag == THINK and text[:at].strip() else at

    def _take(self, text: str) -> list[Part]:
        if self._mode in ("call", "forced"):
            self._call += text
            return []
        if self._mode == "content":
            text = text if self._has_begun else text.lstrip()
            self._has_begun = self._has_begun or bool(text)
            return [Part("content", text)] if text else []
        return [Part("reasoning", text)] if text else []

    def _turn(self, tag: str) -> list[Part]:
        """Behind a tag."""
        if tag == CALL_END:
            call, self._call, self._mode = self._call, "", "content"
            self._has_begun = True
            return [self._called(call, as_written=CALL + call + CALL_END)]
        self._mode = _BEHIND[tag]
        return []

    def _called(self, call: str, as_written: str) -> Part:
        try:
            found: Any = json.loads(call)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return Part("content", as_written)
        self.num_calls += 1
        arguments = found.get("arguments", found.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return Part("call", written, found["name"])
