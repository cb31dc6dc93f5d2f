"""The one thread that owns model, engine and cache: it opens them, steps while there is work, and closes them.

The event loop asks through `call`, and through `submit`, whose `Stream` hears of every step. Calls and withdrawals are
heeded between two steps, so a request that nobody reads any more gives its blocks back before the next one.

    loading -> ready -> stopping -> ended            failed: opening or a step raised; every stream is told why

Invariant: a call that was accepted is answered, also by the end of the thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ktransformer2.engine.llm import LLM
from ktransformer2.engine.outputs import EngineStats, StreamChunk
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import EngineClosedError, KTransformerError, QueueFullError
from ktransformer2.server.facts import Facts
from ktransformer2.server.streams import Stream

State = Literal["loading", "ready", "stopping", "ended", "failed"]
T = TypeVar("T")
_MOST_CALLS = 1024
_REST_S = 1.0  # between two looks after the cache while nobody asks for anything
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """One prompt and how it is to be answered."""

    prompt_ids: Sequence[int]
    params: SamplingParams


class EngineThread:
    """`state`, `facts`, `stats` and `error` may be read from any thread; the rest is for the event loop."""

    def __init__(self, open_llm: Callable[[], LLM], clock: Callable[[], float] = time.monotonic) -> None:
        """`open_llm` is called in the thread, which owns what it returns."""
        self.state: State = "loading"
        self.error = ""  # why it failed
        self.facts: Facts | None = None  # once it was ready
        self.stats = EngineStats()
        self._open, self._clock = open_llm, clock
        self._wake = threading.Condition()  # guards what stands below, up to the thread
        self._calls: deque[tuple[Callable[[LLM], Any], Future[Any]]] = deque()
        self._withdrawn: deque[Stream] = deque()
        self._stop_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="ktransformer-engine", daemon=True)
        self._streams: dict[str, Stream] = {}  # of requests that run; the thread's own

    # --- for the event loop

    def start(self) -> None:
        """Begin to open the model. Its streams live in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def call(self, question: Callable[[LLM], T]) -> T:
        """What `question` answers, asked between two steps. Raises: what it does; EngineClosedError, QueueFullError."""
        answer: Future[T] = Future()
        with self._wake:
            if self.state != "ready":
                raise EngineClosedError(self.why_not())
            if len(self._calls) >= _MOST_CALLS:
                raise QueueFullError(f"{_MOST_CALLS} calls wait for the engine; try again later")
            self._calls.append((question, answer))
            self._wake.notify()
        return await asyncio.wrap_future(answer)

    async def submit(self, works: Sequence[Work], salt: bytes = b"") -> Stream:
        """All of `works`, or none. Close the stream in any case. Raises: as `call` and `Engine.add`."""
        ids = [f"req-{secrets.token_hex(8)}" for _ in works]
        stream = Stream(ids, self._withdraw)
        try:
            await self.call(lambda llm: self._add(llm, stream, works, salt))
        except BaseException:  # also when whoever waits is gone: it may have been added meanwhile
            stream.close()
            raise
        return stream

    def begin_stop(self, drain_s: float) -> None:
        """No new calls; what runs may end within `drain_s`, then its streams end with an error. Twice is once."""
        with self._wake:
            if self._stop_by is None:
                self._stop_by = self._clock() + drain_s
            if self.state == "ready":
                self.state = "stopping"
            self._wake.notify()

    async def stop(self, drain_s: float) -> None:
        """`begin_stop`, and `join`."""
        self.begin_stop(drain_s)
        await asyncio.to_thread(self.join)

    def join(self) -> None:
        """Wait until everything is closed, and what is to last is kept; but not for a model that still loads: its
        thread ends with the process."""
        if self._thread.is_alive() and self.state != "loading":
            self._thread.join()

    def why_not(self) -> str:
        """Why nothing can be asked, in a sentence."""
        if self.state == "loading":
            return "Loading model"
        return f"the engine has failed ({self.error})" if self.state == "failed" else "the server is stopping"

    def _withdraw(self, stream: Stream) -> None:
        with self._wake:
            self._withdrawn.append(stream)
            self._wake.notify()

    # --- the thread

    def _run(self) -> None:
        try:
            llm = self._open()
        except BaseException as error:  # a library in Rust that panics raises no Exception
            self._end("failed", error)
            return
        try:
            self._serve(llm)
        except BaseException as error:
            _log.exception("the engine has failed")
            self._end("failed", error)
        else:
            self._end("ended", EngineClosedError("the server has stopped"))
        finally:
            llm.close()

    def _serve(self, llm: LLM) -> None:
        self.facts = Facts.of(llm)
        with self._wake:
            self.state = "ready" if self._stop_by is None else "stopping"
        while True:
            self._withdraw_all(llm)
            self._answer_calls(llm)
            if llm.engine.has_work and not self._is_over():
                self._hand_out(llm.engine.step())
            elif self._stop_by is not None:
                return
            else:
                llm.maintain()
                self._rest()
            self.stats = llm.stats()

    def _is_over(self) -> bool:
        return self._stop_by is not None and self._clock() >= self._stop_by

    def _rest(self) -> None:
        with self._wake:
            if not self._calls and not self._withdrawn and self._stop_by is None:
                self._wake.wait(_REST_S)

    def _answer_calls(self, llm: LLM) -> None:
        with self._wake:
            calls, self._calls = self._calls, deque()
        for question, answer in calls:
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(question(llm))
            except BaseException as error:
                answer.set_exception(error)  # raised where it was asked

    def _add(self, llm: LLM, stream: Stream, works: Sequence[Work], salt: bytes) -> None:
        for work in works:
            llm.engine.check(work.prompt_ids, work.params)
        for request_id, work in zip(stream.request_ids, works, strict=True):
            try:
                llm.engine.add(work.prompt_ids, work.params, request_id=request_id, salt=salt)
            except KTransformerError:
                self._forget(llm, stream)
                raise
            self._streams[request_id] = stream

    def _withdraw_all(self, llm: LLM) -> None:
        with self._wake:
            withdrawn, self._withdrawn = self._withdrawn, deque()
        for stream in withdrawn:
            self._forget(llm, stream)

    def _forget(self, llm: LLM, stream: Stream) -> None:
        for request_id in stream.request_ids:
            if self._streams.pop(request_id, None) is not None:
                llm.engine.cancel(request_id)

    def _hand_out(self, chunks: Iterable[StreamChunk]) -> None:
        """One wake-up of the loop a step."""
        news = [(self._streams[chunk.request_id], chunk) for chunk in chunks]
        for _, chunk in news:
            if chunk.output is not None:
                del self._streams[chunk.request_id]
        if news:
            self._loop.call_soon_threadsafe(_deliver, news)

    def _end(self, state: State, error: BaseException) -> None:
        """Everyone who waits is told."""
        if state == "failed":
            self.error = type(error).__name__  # what it says may quote a prompt
            error = EngineClosedError(f"the engine has failed ({self.error}); the server must be started again")
        with self._wake:
            self.state = state
            calls, self._calls = self._calls, deque()
        for _, answer in calls:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        streams = set(self._streams.values())
        self._streams.clear()
        self._loop.call_soon_threadsafe(_fail, streams, error)


def _deliver(news: list[tuple[Stream, StreamChunk]]) -> None:
    for stream, chunk in news:
        stream.put(chunk)


def _fail(streams: set[Stream], error: BaseException) -> None:
    for stream in streams:
        stream.fail(error)
