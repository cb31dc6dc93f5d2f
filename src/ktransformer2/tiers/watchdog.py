"""Ends what takes too long: one thread for all calls of one owner. Knows no server.

The thread is started when the watchdog is made, not when something is watched: a Python that has begun to end starts no
thread any more, and the last blocks are written then.

Invariant: each `limit_s` that something is watched for is followed by one `act`, from the watchdog's thread: a call
that was between two connections at the first is ended by the second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ktransformer2.tiers.tally import LOG


class Watchdog:
    """Any thread may be watched, and several at a time."""

    def __init__(self, limit_s: float, act: Callable[[], None]) -> None:
        self._limit_s, self._act = limit_s, act
        self._state = threading.Condition()
        self._deadlines: dict[object, float] = {}  # by `time.monotonic`, the next one first
        self._rests = self._closed = False
        threading.Thread(target=self._run, name="ktransformer2 watchdog", daemon=True).start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What happens inside is to be over in `limit_s`."""
        call = object()
        with self._state:
            self._deadlines[call] = time.monotonic() + self._limit_s
            if self._rests:
                self._state.notify()
        try:
            yield
        finally:
            with self._state:
                self._deadlines.pop(call, None)

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        with self._state:
            self._closed = True
            self._state.notify()

    def _run(self) -> None:
        while self._wait_until_due():
            try:
                self._act()
            except Exception:  # of a library's making: the next call must be watched all the same
                LOG.exception("ending a call that took too long has failed")

    def _wait_until_due(self) -> bool:
        """Sleep until a call has taken too long, and give it as long again. False: closed."""
        with self._state:
            while not self._closed:
                call = next(iter(self._deadlines), None)
                if call is None:
                    self._rests = True
                    self._state.wait()
                    self._rests = False
                elif (left_s := self._deadlines[call] - time.monotonic()) > 0:
                    self._state.wait(left_s)
                else:
                    del self._deadlines[call]  # to the end: the next one first
                    self._deadlines[call] = time.monotonic() + self._limit_s
                    return True
        return False
