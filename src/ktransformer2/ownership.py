"""One thread at a time owns memory, cache and scheduler; here the others are told. Knows nothing of what is owned."""

from __future__ import annotations

import os
import threading

from ktransformer2.errors import OwnershipError


class Owner:
    """The thread that something belongs to: the one that calls `check` first, or first after `hand_over`.

    A thread that has ended owns nothing: what it left half done belongs to whoever comes next.
    """

    def __init__(self, what: str) -> None:
        """`what` names the thing in the message, such as "the engine"."""
        self._what = what
        self._thread: tuple[int, int] | None = None  # process id, thread id

    def check(self) -> None:
        """Side effect: the first call takes possession. Raises: OwnershipError from any other thread or process."""
        here = (os.getpid(), threading.get_ident())
        if self._thread is None or self._has_ended(here):
            self._thread = here
        if self._thread != here:
            process, thread = self._thread
            which = "a child process after fork" if process != here[0] else "a second thread"
            raise OwnershipError(
                f"{self._what} belongs to thread {thread} of process {process} and was used from {which}; "
                "send the work to that thread, or make another one here"
            )

    def hand_over(self) -> None:
        """The next thread that calls `check` takes possession. Raises: OwnershipError from a thread that has none."""
        self.check()
        self._thread = None

    def _has_ended(self, here: tuple[int, int]) -> bool:
        assert self._thread is not None, "it has no owner"
        if self._thread == here or self._thread[0] != here[0]:
            return False
        return all(thread.ident != self._thread[1] for thread in threading.enumerate())
