"""Blocks on their way up: keys in, payloads out, read by a thread of its own. Knows tiers and keys only.

    submit     from the owner of the cache: one transfer, for whose bytes it has made room
    arrivals   what has come since, to be taken at the start of a step

A transfer takes from each tier, nearest first, what it has of the leading keys, and ends at the first that none has.

Invariants: at most `MOST_WAITING` transfers wait; every transfer that was taken arrives exactly once, if only empty;
nothing that a tier does ends the thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.tier import Payload, Tier

MOST_WAITING = 64


@dataclass(frozen=True)
class Arrival:
    """What came of one transfer: the payloads of its leading keys, each with the tier it is from.

    `ticket` is whose it was, `seconds` how long reading took, `done_s` when it was done by `time.monotonic`.
    """

    ticket: int
    keys: tuple[bytes, ...]
    payloads: tuple[Payload, ...] = field(default=(), repr=False)
    tiers: tuple[str, ...] = ()
    seconds: float = 0.0
    done_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.payloads))


class Prefetcher:
    """The way up from `tiers`, nearest first. All calls are the owner's; one thread reads."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._state = threading.Condition()
        self._waiting: deque[tuple[int, tuple[bytes, ...]]] = deque()
        self._arrived: deque[Arrival] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._tallies = {tier.name: Tally(tier.name) for tier in tiers}

    def submit(self, ticket: int, keys: Sequence[bytes]) -> bool:
        """Read the payloads of `keys`, a chain. False: too many transfers wait, or nobody can read."""
        with self._state:
            if self._closed or len(self._waiting) >= MOST_WAITING:
                return False
            try:
                self._start()
            except RuntimeError:  # the system has no thread left; then nothing is fetched
                return False
            self._waiting.append((ticket, tuple(keys)))
            self._state.notify_all()
        return True

    def cancel(self, ticket: int) -> None:
        """What still waits under this ticket arrives empty, unread."""
        with self._state:
            kept: deque[tuple[int, tuple[bytes, ...]]] = deque()
            for waiting in self._waiting:
                if waiting[0] == ticket:
                    self._arrived.append(Arrival(*waiting, done_s=time.monotonic()))
                else:
                    kept.append(waiting)
            self._waiting = kept

    def arrivals(self) -> list[Arrival]:
        """What arrived since the last call, in that order."""
        if not self._arrived:  # looked at in every step: a lock for nothing would be most of its cost
            return []
        with self._state:
            arrived = list(self._arrived)
            self._arrived.clear()
        return arrived

    def wait(self, limit_s: float) -> bool:
        """Sleep until something has arrived, at most `limit_s`; whether it has."""
        with self._state:
            return self._state.wait_for(lambda: bool(self._arrived), limit_s)

    def close(self, limit_s: float = 0.0) -> bool:
        """Read no more; False: a transfer is still under way after `limit_s`, and ends with its thread."""
        with self._state:
            self._closed = True
            self._waiting.clear()
            self._state.notify_all()
            thread = self._thread
        if thread is None:
            return True
        thread.join(limit_s)
        return not thread.is_alive()

    # --- the reader's side

    def read_one(self) -> bool:
        """Read the transfer that waits longest. False: none does. The thread's work, and a test's that has none."""
        with self._state:
            if self._closed or not self._waiting:
                return False
            ticket, keys = self._waiting.popleft()
        began = time.monotonic()
        payloads, tiers = self._read(keys)
        done = time.monotonic()
        with self._state:
            self._arrived.append(Arrival(ticket, keys, tuple(payloads), tuple(tiers), done - began, done))
            self._state.notify_all()
        return True

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="ktransformer2 reader", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while not self._closed:
            if not self.read_one():
                with self._state:
                    self._state.wait_for(lambda: self._closed or bool(self._waiting))

    def _read(self, keys: tuple[bytes, ...]) -> tuple[list[Payload], list[str]]:
        payloads: list[Payload] = []
        names: list[str] = []
        before = -1
        while before < len(payloads) < len(keys):
            before = len(payloads)
            for tier in self._tiers:
                got = self._get(tier, keys[len(payloads) :])
                payloads += got
                names += [tier.name] * len(got)
        return payloads, names

    def _get(self, tier: Tier, keys: tuple[bytes, ...]) -> Sequence[Payload]:
        """A tier promises to raise nothing; one that does has nothing."""
        try:
            return tier.get(keys)[: len(keys)] if keys and tier.may_hold(keys[0]) else []
        except Exception as error:
            self._tallies[tier.name].failed("get", repr(error))
            return []
