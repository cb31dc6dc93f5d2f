"""Tools as clients name them -> as templates take them and as a schema that an answer must keep to. Pure.

A template that knows no tools gets them in words: a system text that says what there is and how to call it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktransformer2.server.answer_reader import CALL, CALL_END
from ktransformer2.server.problems import ApiError

_EMPTY: Mapping[str, Any] = {"type": "object", "properties": {}}
_THERE_ARE = "You may call functions. They are described here, one a line, as JSON:"
_HOW = f'To call one, answer with {CALL}{{"name": NAME, "arguments": ARGUMENTS}}{CALL_END}; ARGUMENTS is a JSON object.'


@dataclass(frozen=True)
class Tools:
    """What may be called. `forced`: a call must come; `schema`: what it must look like."""

    functions: tuple[dict[str, Any], ...] = ()
    forced: bool = False

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, most: int) -> Tools:
        """Of a body: tools of type function, nested as in chats or flat as in responses. Raises: ApiError.

        `most`: bytes of them all together.
        """
        functions = tuple(_function(tool, place) for place, tool in enumerate(tools or ()))
        if len(json.dumps(functions)) > most:
            raise ApiError(400, f"the tools are larger than {most:,} bytes", "tools_too_large", param="tools")
        match choice:
            case "none":
                return cls()
            case None | "auto":
                return cls(functions)
            case "required":
                named = functions
            case Mapping():
                function = choice.get("function")
                name = choice.get("name") or (function.get("name") if isinstance(function, Mapping) else None)
                named = tuple(function for function in functions if function["name"] == name)
            case _:
                named = ()
        if not named:
            raise ApiError(400, "tool_choice names no tool that is there", "invalid_request", param="tool_choice")
        return cls(named, forced=True)

    @property
    def schema(self) -> dict[str, Any]:
        """Of one call."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": function["parameters"]},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in self.functions
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    @property
    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": function} for function in self.functions]

    def in_words(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with what a template that knows no tools would leave out."""
        said = [_in_words(message) for message in messages]
        if not self.functions:
            return said
        text = "\n".join((_THERE_ARE, *map(json.dumps, self.functions), _HOW))
        if said and said[0]["role"] == "system":
            return [{**said[0], "content": f"{said[0]['content']}\n\n{text}"}, *said[1:]]
        return [{"role": "system", "content": text}, *said]


def uses_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has calls or their results in it."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def with_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as objects, as templates take them. Raises: ApiError."""
    for place, message in enumerate(messages):
        if not isinstance(message.get("tool_calls") or [], list):
            raise ApiError(400, "tool_calls is a list", "invalid_request", param=f"messages[{place}].tool_calls")
    return [
        {**message, "tool_calls": [_call(call, place) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for place, message in enumerate(messages)
    ]


def _function(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    found = tool.get("function", tool)
    name = found.get("name") if isinstance(found, Mapping) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        raise ApiError(400, "a tool is of type function and has a name", "invalid_request", param=f"tools[{place}]")
    parameters = found.get("parameters") or _EMPTY
    if not isinstance(parameters, Mapping):
        raise ApiError(400, "parameters are a JSON schema", "invalid_request", param=f"tools[{place}].parameters")
    return {"name": name, "description": str(found.get("description") or ""), "parameters": dict(parameters)}


def _call(call: object, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        found = None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(found, Mapping):
        raise ApiError(
            400,
            "a call has a function with a name and arguments, a JSON object in a text",
            "invalid_request",
            param=f"messages[{place}].tool_calls",
        )
    return {**call, "function": {**function, "arguments": found}}


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    calls = [
        CALL + json.dumps({"name": call["function"].get("name"), "arguments": call["function"]["arguments"]}) + CALL_END
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": "".join([message.get("content") or "", *calls])}
