"""`/v1/completions`: a text goes on. Bodies to works, outputs and chunks to objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from ktransformer2.engine.outputs import StreamChunk
from ktransformer2.server import answers
from ktransformer2.server.engine_thread import Work
from ktransformer2.server.problems import ApiError
from ktransformer2.server.schemas import CompletionBody
from ktransformer2.server.service import Service
from ktransformer2.server.sse import DONE, PING, event
from ktransformer2.server.streams import Stream


class CompletionCall:
    """One request to the route."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        self._service, self._body = service, body
        self._head = answers.head("text_completion", "cmpl-", service.names[0])
        self._notes: dict[str, Any] = {"ignored_fields": body.ignored}
        self._offsets: Counter[int] = Counter()

    async def works(self) -> list[Work]:
        """Raises: RequestError, ApiError."""
        body = self._body
        if not body.prompts:
            raise ApiError(400, "prompt is an empty list; give a text or token ids", "invalid_request", param="prompt")
        self._service.check_answers(len(body.prompts) * (body.n or 1))
        prompts = [await self._service.prompts.encode(prompt) for prompt in body.prompts]
        if any(self._service.prompts.begins_twice(ids) for ids in prompts):
            self._notes["warnings"] = ["the prompt begins with two begin-of-text tokens; leave yours out"]
        return [
            Work(
                ids,
                body.sampling(
                    n=body.n or 1,
                    logprobs=body.logprobs,
                    max_new_tokens=self._service.reserve(body.max_tokens, len(ids)),
                ),
            )
            for ids in prompts
        ]

    def result(self, stream: Stream) -> dict[str, Any]:
        """The whole answer, once the stream is read."""
        choices = [
            self._choice(index, answer.text, answer.logprobs, answer.finish_reason)
            for index, answer in enumerate(answer for output in stream.results for answer in output.completions)
        ]
        return {**self._head, "choices": choices, **self._closing(stream)}

    async def events(self, stream: Stream) -> AsyncIterator[bytes]:
        wants_usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        n = self._body.n or 1
        async for chunk in self._service.news(stream):
            if chunk is None:
                yield PING
            elif chunk.text or chunk.logprobs or chunk.finish_reason is not None:
                yield event({**self._head, "choices": [self._news(chunk, n * stream.place(chunk) + chunk.index)]})
        if wants_usage:
            yield event({**self._head, "choices": [], **self._closing(stream)})
        yield DONE

    def _news(self, chunk: StreamChunk, index: int) -> dict[str, Any]:
        logprobs = None if self._body.logprobs is None else chunk.logprobs
        return self._choice(index, chunk.text, logprobs, chunk.finish_reason)

    def _choice(self, index: int, text: str, logprobs: Any, reason: Any) -> dict[str, Any]:
        piece = self._service.prompts.piece
        named = answers.completion_logprobs(logprobs, piece, self._offsets[index])
        self._offsets[index] += sum(map(len, named["tokens"])) if named else 0
        return {"index": index, "text": text, "logprobs": named, "finish_reason": answers.reason_of(reason)}

    def _closing(self, stream: Stream) -> dict[str, Any]:
        extra = answers.extra_of(stream.results, self._service.facts, self._notes)
        return {"usage": answers.usage_of(stream.results), "ktransformer": extra}
