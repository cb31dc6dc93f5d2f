"""A TCP proxy on this machine that lets pass, holds back, cuts and changes what a server answers. Faults are exact.

`fault` is what is done to answers from now on, also on connections that are open:

    PASS          nothing
    HANG          they are swallowed
    REFUSE        the connection is closed at the next request, a new one at once
    cut(n)        the first n bytes of answers pass, then the connection is closed
    garble(seed)  one bit in sixteen bytes or so is turned, always the same for a seed
    trickle(s)    one byte each s seconds
    say(answer)   each request gets these bytes instead
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Self

Fault = Callable[[bytes], Iterable[bytes]]  # the pieces that pass of an answer; raises EOFError to hang up


def PASS(answer: bytes) -> Iterable[bytes]:  # noqa: N802  a value, like the others here
    return [answer]


def HANG(answer: bytes) -> Iterable[bytes]:  # noqa: N802
    return []


def REFUSE(answer: bytes) -> Iterable[bytes]:  # noqa: N802
    raise EOFError


def cut(num_bytes: int) -> Fault:
    left = num_bytes

    def fault(answer: bytes) -> Iterable[bytes]:
        nonlocal left
        yield answer[: max(0, left)]
        left -= len(answer)
        if left <= 0:
            raise EOFError

    return fault


def garble(seed: int) -> Fault:
    chance = random.Random(seed)

    def fault(answer: bytes) -> Iterable[bytes]:
        changed = bytearray(answer)
        for at in range(len(changed)):
            if chance.randrange(16) == 0:
                changed[at] ^= 1 << chance.randrange(8)
        yield bytes(changed)

    return fault


def trickle(pause_s: float) -> Fault:
    def fault(answer: bytes) -> Iterable[bytes]:
        for byte in answer:
            time.sleep(pause_s)
            yield bytes([byte])

    return fault


def say(words: bytes) -> Fault:
    return lambda _: [words]


class FaultProxy:
    """Listens on a port of its own; every connection has two threads, which end with it."""

    def __init__(self, server_port: int) -> None:
        self.fault: Fault = PASS
        self.connections = 0
        self._server_port = server_port
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in (self._listening, *self._sockets):
            _hang_up(opened)
        for thread in self._threads:
            thread.join(5)
        assert not any(thread.is_alive() for thread in self._threads)

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:  # the proxy has ended
                return
            self.connections += 1
            if self.fault is REFUSE:
                _hang_up(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._sockets += [client, server]
            self._start(partial(self._pump, client, server, PASS))
            self._start(partial(self._pump, server, client, self._answer))

    def _answer(self, answer: bytes) -> Iterable[bytes]:
        """As `fault` is now."""
        return self.fault(answer)

    def _pump(self, source: socket.socket, target: socket.socket, fault: Fault) -> None:
        with suppress(OSError, EOFError):  # one of the two has hung up, or the fault says so
            while data := source.recv(2**16):
                for piece in fault(data):
                    target.sendall(piece)
        _hang_up(source)
        _hang_up(target)


def _hang_up(opened: socket.socket) -> None:
    with suppress(OSError):  # it may not be connected any more
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()
