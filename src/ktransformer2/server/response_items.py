"""Items of `/v1/responses` -> messages of a chat, and parts of an answer -> items. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktransformer2.server import answers
from ktransformer2.server.answer_reader import Part
from ktransformer2.server.problems import ApiError

TYPES = {"content": "message", "reasoning": "reasoning", "call": "function_call"}  # of items, by the kind of a part


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages that an input says. What a model thought is not told to it again. Raises: ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)  # one message, as the turn that made them
            case "function_call_output":
                result = item.get("output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": result})
            case "reasoning":
                pass
            case other:
                message = f"items of type {str(other)[:40]!r} are not served"
                raise ApiError(400, message, "invalid_request", param=f"input[{place}].type")
    return messages


def new_item(part: Part) -> dict[str, Any]:
    """The item of an output that a part begins, still empty."""
    begun = {"type": TYPES[part.kind], "status": "in_progress"}
    match part.kind:
        case "call":
            called = {"call_id": answers.new_id("call_"), "name": part.name, "arguments": ""}
            return {"id": answers.new_id("fc_"), **begun, **called}
        case "reasoning":
            return {"id": answers.new_id("rs_"), **begun, "summary": [], "content": []}
    return {"id": answers.new_id("msg_"), **begun, "role": "assistant", "content": []}
