"""When to stop asking a server that fails, and when to try again. Knows no server.

    closed      everybody asks; `max_failures` failures in a row open it
    open        nobody asks, for `pause_s`
    half-open   after each pause one caller may ask: an answer closes it, a failure leaves it open

Invariant: between two answers no more than `max_failures` callers in a row, and then one a pause, wait for a server in
vain. A clock that jumps back ends the pause; it never makes it longer.
"""

from __future__ import annotations

import threading

from ktransformer2.tiers.tier import Clock


class CircuitBreaker:
    """Any thread: ask `admit` before a call, and tell `succeeded` or `failed` after it."""

    def __init__(self, clock: Clock, max_failures: int = 3, pause_s: float = 5.0) -> None:
        self._clock, self._max_failures, self._pause_s = clock, max_failures, pause_s
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._paused_s = 0.0  # when the pause began, where it is open

    @property
    def is_open(self) -> bool:
        """Whether `admit` would refuse now. Takes no turn."""
        return self._failures >= self._max_failures and not self._pause_is_over()

    def admit(self) -> bool:
        """Whether this caller may ask. After a pause the first one may, and the next pause begins for the others."""
        with self._lock:
            if self._failures < self._max_failures:
                return True
            if not self._pause_is_over():
                return False
            self._paused_s = self._clock()
            return True

    def succeeded(self) -> None:
        """The server has answered."""
        with self._lock:
            self._failures = 0

    def failed(self) -> bool:
        """The server has not. True: this was the failure that opened it."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._max_failures:
                self._paused_s = self._clock()
            return self._failures == self._max_failures

    def _pause_is_over(self) -> bool:
        return not 0 <= self._clock() - self._paused_s < self._pause_s
