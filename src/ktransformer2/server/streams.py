"""What the engine's thread sends to one caller in the event loop. Knows no engine; everything here runs in the loop.

Bounded without a queue's bound: an answer's tokens are bounded by its reserve, and of a prefill's progress only the
latest is kept. Invariant: after `close` nobody works for the stream any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from ktransformer2.engine.outputs import RequestOutput, StreamChunk


class Stream:
    """News of some requests that one HTTP request asks for together, in the order in which they came."""

    def __init__(self, request_ids: Sequence[str], withdraw: Callable[[Stream], None]) -> None:
        """`withdraw` is called once, by a `close` that comes before the end."""
        self.request_ids = tuple(request_ids)
        self.outputs: dict[str, RequestOutput] = {}  # of those whose last chunk was read
        self._withdraw, self._closers = withdraw, list[Callable[[], None]]()
        self._news: deque[StreamChunk] = deque()
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None
        self._closed = False

    @property
    def is_read(self) -> bool:
        return len(self.outputs) == len(self.request_ids)

    def place(self, chunk: StreamChunk) -> int:
        """Which of the requests it is about."""
        return self.request_ids.index(chunk.request_id)

    def put(self, chunk: StreamChunk) -> None:
        last = self._news[-1] if self._news else None
        if last is not None and last.request_id == chunk.request_id and not last.token_ids and last.output is None:
            self._news.pop()  # mere progress, which the new one has too
        self._news.append(chunk)
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Nothing will come any more; what has come is still read."""
        self._error = error
        self._arrived.set()

    async def read(self, wait_s: float) -> StreamChunk | None:
        """The next chunk; None: nothing came for `wait_s`. Raises: what ended a request, or all of them."""
        try:
            async with asyncio.timeout(wait_s):
                await self._arrived.wait()
        except TimeoutError:
            return None
        if not self._news:
            assert self._error is not None, "woken for nothing"
            raise self._error
        chunk = self._news.popleft()
        if not self._news and self._error is None:
            self._arrived.clear()
        if chunk.output is not None:
            if chunk.output.error is not None:
                raise chunk.output.error
            self.outputs[chunk.request_id] = chunk.output
        return chunk

    async def finish(self) -> list[RequestOutput]:
        """All outputs, in the order of the requests. Raises: as `read`."""
        while not self.is_read:
            await self.read(60.0)
        return self.results

    @property
    def results(self) -> list[RequestOutput]:
        """The outputs in the order of the requests, once all are read."""
        return [self.outputs[request_id] for request_id in self.request_ids]

    def when_closed(self, closer: Callable[[], None]) -> None:
        self._closers.append(closer)

    def close(self) -> None:
        """Nobody reads any more: what still runs is withdrawn. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self.is_read:
            self._withdraw(self)
        for closer in self._closers:
            closer()
