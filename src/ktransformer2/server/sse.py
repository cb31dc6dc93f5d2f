"""Server-sent events as the official clients read them, over starlette's streaming response. Knows no meaning."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ktransformer2.server.problems import ApiError, failure
from ktransformer2.server.streams import Stream

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
# A reader that takes nothing holds a place; past the request's own time it has so long to take the end.
_GRACE_S = 5.0
_log = logging.getLogger(__name__)


def event(data: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()  # ASCII: some readers end a line at U+2028


class EventStream(StreamingResponse):
    """Sends `events` until they end or the client is gone, and closes `stream` in any case."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], stream: Stream, limit_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(_with_error(events), headers={"Cache-Control": "no-store", **(headers or {})})
        self._stream, self._limit_s = stream, limit_s + _GRACE_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            _log.warning("a client did not read its answer within %g s and was hung up on", self._limit_s)
        finally:
            self._stream.close()


async def _with_error(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What goes wrong on the way is the last event: the status has been sent."""
    try:
        async for each in events:
            yield each
    except Exception as error:
        yield event(logged(error).body)


def logged(error: Exception) -> ApiError:
    """What the client is told. Side effect: a fault of ours goes to the log."""
    problem = failure(error)
    if problem.code == "internal_error":
        _log.error("a stream ended with an error of the server", exc_info=error)
    return problem
