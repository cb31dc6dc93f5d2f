"""`/v1/responses`: a turn of a conversation that the server remembers. Bodies to works, outputs to objects."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ktransformer2.engine.outputs import FinishReason, RequestOutput
from ktransformer2.server import answers
from ktransformer2.server.answer_reader import Part
from ktransformer2.server.chat import message_of
from ktransformer2.server.conversations import Conversations, Said
from ktransformer2.server.engine_thread import Work
from ktransformer2.server.keys import Caller
from ktransformer2.server.response_items import TYPES, messages_of, new_item
from ktransformer2.server.schemas import ResponsesBody
from ktransformer2.server.service import Service
from ktransformer2.server.sse import PING, event, logged
from ktransformer2.server.streams import Stream
from ktransformer2.server.tools import Tools
from ktransformer2.server.turns import Turn, next_turn, wanted_schema


class ResponsesCall:
    """One request to the route."""

    def __init__(self, service: Service, body: ResponsesBody, kept: Conversations, caller: Caller) -> None:
        self._service, self._body, self._kept, self._caller = service, body, kept, caller
        self._id, self._created = answers.new_id("resp_"), int(time.time())
        self._notes: dict[str, Any] = {"ignored_fields": body.ignored}
        self._turn: Turn
        self._messages: tuple[dict[str, Any], ...] = ()
        self._number = 0

    async def works(self) -> list[Work]:
        """Raises: RequestError, ApiError."""
        body, before = self._body, None
        if body.previous_response_id is not None:
            before = self._kept.find(body.previous_response_id, self._caller.name)
        self._messages = (*(before.messages if before else ()), *messages_of(body.input))
        told = [{"role": "system", "content": body.instructions}] if body.instructions else []
        tools = Tools.of(body.tools, body.tool_choice, self._service.limits.schema_bytes)
        schema = wanted_schema((body.text or {}).get("format"))
        self._turn = await next_turn(self._service, [*told, *self._messages], tools, schema, before)
        if self._turn.warnings:
            self._notes["warnings"] = list(self._turn.warnings)
        params = body.sampling(
            constraint=self._turn.constraint,
            max_new_tokens=self._service.reserve(body.max_output_tokens, len(self._turn.prompt_ids)),
        )
        return [Work(self._turn.prompt_ids, params)]

    def result(self, stream: Stream) -> dict[str, Any]:
        """The whole answer, once the stream is read. Side effect: it is kept, unless it is not to be stored."""
        (output,) = stream.results
        reader, items = self._turn.reader(), list[dict[str, Any]]()
        parts = reader.push(output.text) + reader.finish()
        for part in parts:
            self._part_events(part, items)
        self._closing_events(items, _status(output.finish_reason)[0])
        return self._ended(output, parts, items)

    async def events(self, stream: Stream) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self._object("in_progress", []))
        yield self._event("response.in_progress", response=self._object("in_progress", []))
        reader, parts, items = self._turn.reader(), list[Part](), list[dict[str, Any]]()
        try:
            async for chunk in self._service.news(stream):
                if chunk is None:
                    yield PING
                    continue
                news = reader.push(chunk.text)
                if chunk.finish_reason is not None:
                    news += reader.finish()
                parts += news
                for part in news:
                    for each in self._part_events(part, items):
                        yield each
        except Exception as error:
            problem = logged(error)
            failed = {"code": "server_error", "message": problem.message}
            yield self._event("response.failed", response=self._object("failed", items) | {"error": failed})
            return
        (output,) = stream.results
        for each in self._closing_events(items, _status(output.finish_reason)[0]):
            yield each
        ended = self._ended(output, parts, items)
        yield self._event(f"response.{ended['status']}", response=ended)

    def _part_events(self, part: Part, items: list[dict[str, Any]]) -> list[bytes]:
        """What a new part is told with. Side effect: `items` has it."""
        told: list[bytes] = []
        if part.kind == "call" or not items or items[-1]["type"] != TYPES[part.kind]:
            told += self._closing_events(items)
            items.append(new_item(part))
            told.append(self._event("response.output_item.added", output_index=len(items) - 1, item=items[-1]))
            if part.kind == "content":
                items[-1]["content"] = [_text("")]
                told.append(self._place("response.content_part.added", items, part=_text("")))
        item = items[-1]
        match part.kind:
            case "content":
                item["content"][0]["text"] += part.text
                told.append(self._place("response.output_text.delta", items, delta=part.text, logprobs=[]))
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": _reasoning(item) + part.text}]
                told.append(self._place("response.reasoning_text.delta", items, delta=part.text))
            case "call":
                item["arguments"] = part.text
                place = {"item_id": item["id"], "output_index": len(items) - 1}
                told.append(self._event("response.function_call_arguments.delta", **place, delta=part.text))
        return told

    def _closing_events(self, items: list[dict[str, Any]], status: str = "completed") -> list[bytes]:
        """The last item gets no more. Side effect: its `status`."""
        if not items:
            return []
        item, told = items[-1], list[bytes]()
        match item["type"]:
            case "message":
                text = item["content"][0]
                told.append(self._place("response.output_text.done", items, text=text["text"], logprobs=[]))
                told.append(self._place("response.content_part.done", items, part=text))
            case "reasoning":
                told.append(self._place("response.reasoning_text.done", items, text=_reasoning(item)))
            case "function_call":
                place = {"item_id": item["id"], "output_index": len(items) - 1}
                told.append(self._event("response.function_call_arguments.done", **place, arguments=item["arguments"]))
        item["status"] = status
        return [*told, self._event("response.output_item.done", output_index=len(items) - 1, item=item)]

    def _ended(self, output: RequestOutput, parts: Sequence[Part], items: list[dict[str, Any]]) -> dict[str, Any]:
        usage = output.usage
        status, why = _status(output.finish_reason)
        response = self._object(status, items) | {
            "incomplete_details": why,
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
                },
                "output_tokens": usage.new_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.new_tokens,
            },
            "ktransformer": answers.extra_of([output], self._service.facts, self._notes),
        }
        if self._body.store is not False:
            answer = tuple(token for token in output.token_ids if token not in self._service.facts.end_tokens)
            told_again = ("role", "content", "tool_calls")  # what a model thought is not
            message = {name: value for name, value in message_of(parts).items() if name in told_again}
            said = Said(self._caller.name, (*self._messages, message), tuple(self._turn.prompt_ids), answer, response)
            self._kept.keep(self._id, said)
        return response

    def _object(self, status: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": self._service.names[0],
            "output": list(items),
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def _place(self, kind: str, items: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        """An event about the first content of the last item."""
        place = {"item_id": items[-1]["id"], "output_index": len(items) - 1, "content_index": 0}
        return self._event(kind, **place, **more)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _status(reason: FinishReason) -> tuple[str, dict[str, str] | None]:
    return ("incomplete", {"reason": "max_output_tokens"}) if reason == "length" else ("completed", None)


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(item: Mapping[str, Any]) -> str:
    return "".join(content["text"] for content in item["content"])
