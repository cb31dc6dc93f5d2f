"""`/v1/chat/completions`: the next message of a conversation. Bodies to works, outputs and chunks to objects."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from ktransformer2.engine.outputs import Completion, FinishReason, StreamChunk, TokenLogprob
from ktransformer2.server import answers
from ktransformer2.server.answer_reader import AnswerReader, Part
from ktransformer2.server.engine_thread import Work
from ktransformer2.server.schemas import ChatBody
from ktransformer2.server.service import Service
from ktransformer2.server.sse import DONE, PING, event
from ktransformer2.server.streams import Stream
from ktransformer2.server.tools import Tools
from ktransformer2.server.turns import Turn, next_turn, wanted_schema


class ChatCall:
    """One request to the route."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._service, self._body = service, body
        self._notes: dict[str, Any] = {"ignored_fields": body.ignored}
        self._turn: Turn

    async def works(self) -> list[Work]:
        """Raises: RequestError, ApiError."""
        body = self._body
        tools = Tools.of(body.tools, body.tool_choice, self._service.limits.schema_bytes)
        self._turn = turn = await next_turn(self._service, body.messages, tools, wanted_schema(body.response_format))
        if turn.warnings:
            self._notes["warnings"] = list(turn.warnings)
        asked = body.max_completion_tokens or body.max_tokens
        params = body.sampling(
            n=body.n or 1,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            constraint=turn.constraint,
            max_new_tokens=self._service.reserve(asked, len(turn.prompt_ids)),
        )
        return [Work(turn.prompt_ids, params)]

    def result(self, stream: Stream) -> dict[str, Any]:
        """The whole answer, once the stream is read."""
        (output,) = stream.results
        choices = [self._answer(answer) for answer in output.completions]
        return {**self._head("chat.completion"), "choices": choices, **self._closing(stream)}

    async def events(self, stream: Stream) -> AsyncIterator[bytes]:
        head, began_s = self._head("chat.completion.chunk"), time.monotonic()
        readers = [self._turn.reader() for _ in range(self._body.n or 1)]
        for index in range(len(readers)):
            yield event({**head, "choices": [_choice(index, {"role": "assistant", "content": ""})]})
        async for chunk in self._service.news(stream):
            if chunk is None:
                yield PING
                continue
            if chunk.prefill is not None and self._body.return_progress:
                progress = answers.progress_of(chunk, began_s, time.monotonic())
                yield event({**head, "choices": [], "prompt_progress": progress})
            for choice in self._news(chunk, readers[chunk.index]):
                yield event({**head, "choices": [choice]})
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event({**head, "choices": [], **self._closing(stream)})
        yield DONE

    def _news(self, chunk: StreamChunk, reader: AnswerReader) -> Iterable[dict[str, Any]]:
        """A choice for every part that the chunk settles; its log probabilities go with the first."""
        num_calls = reader.num_calls
        parts = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            parts += reader.finish()
        deltas = []
        for part in parts:
            deltas.append(_delta(part, num_calls))
            num_calls += part.kind == "call"
        logprobs = self._logprobs(chunk.logprobs if self._body.logprobs else None)
        if logprobs is not None and logprobs["content"] and not deltas:
            deltas = [{"content": ""}]
        for place, delta in enumerate(deltas):
            yield _choice(chunk.index, delta) | {"logprobs": logprobs if place == 0 else None}
        if chunk.finish_reason is not None:
            yield _choice(chunk.index, {}) | {"finish_reason": _reason(chunk.finish_reason, reader)}

    def _answer(self, answer: Completion) -> dict[str, Any]:
        reader = self._turn.reader()
        parts = reader.push(answer.text) + reader.finish()
        return {
            "index": answer.index,
            "message": message_of(parts),
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": _reason(answer.finish_reason, reader),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return answers.chat_logprobs(logprobs, self._service.prompts.piece)

    def _head(self, kind: str) -> dict[str, Any]:
        return answers.head(kind, "chatcmpl-", self._service.names[0])

    def _closing(self, stream: Stream) -> dict[str, Any]:
        extra = answers.extra_of(stream.results, self._service.facts, self._notes)
        return {"usage": answers.usage_of(stream.results), "ktransformer": extra}


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """The assistant's message. Reasoning stands under both names that clients know."""
    content, reasoning = ("".join(p.text for p in parts if p.kind == kind) for kind in ("content", "reasoning"))
    calls = [_call(part) for part in parts if part.kind == "call"]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    message["refusal"] = None
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return message | ({"tool_calls": calls} if calls else {})


def _delta(part: Part, index: int) -> dict[str, Any]:
    match part.kind:
        case "call":
            return {"tool_calls": [{"index": index, **_call(part)}]}
        case "reasoning":
            return {"reasoning": part.text, "reasoning_content": part.text}
    return {"content": part.text}


def _call(part: Part) -> dict[str, Any]:
    return {"id": answers.new_id("call_"), "type": "function", "function": {"name": part.name, "arguments": part.text}}


def _reason(reason: FinishReason, reader: AnswerReader) -> str | None:
    return "tool_calls" if reason == "stop" and reader.num_calls else answers.reason_of(reason)


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
