"""Questions of other threads, put by until the owner of the cache comes by. Knows no cache and no question.

Bounded: when too many wait, one more is refused. Any thread may `add`; the owner answers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from ktransformer2.errors import EngineClosedError, QueueFullError

MOST_WAITING = 16
T = TypeVar("T")
Asked = TypeVar("Asked")


class Questions(Generic[Asked]):
    """Questions to one `Asked`, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[Asked], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def add(self, question: Callable[[Asked], T]) -> Future[T]:
        """The future raises what the question does. Raises: EngineClosedError, QueueFullError."""
        answer: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise EngineClosedError("the cache was closed; nobody is left to ask")
            if len(self._waiting) >= MOST_WAITING:
                raise QueueFullError(f"{MOST_WAITING} questions wait for the cache's owner; ask again later")
            self._waiting.append((question, answer))
        return answer

    def answer_one(self, asked: Asked) -> None:
        """Answer the question that waits longest. None waits: nothing, at no cost."""
        if not self._waiting:
            return
        with self._lock:
            question, answer = self._waiting.popleft()
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(question(asked))
        except Exception as error:
            answer.set_exception(error)  # raised where it was asked, not in a step of the owner

    def close(self) -> None:
        """Who waits is told that nobody will come."""
        with self._lock:
            self._closed = True
            for _, answer in self._waiting:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(EngineClosedError("the cache was closed before it answered"))
            self._waiting.clear()
