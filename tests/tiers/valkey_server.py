"""A real server of its own for the tests, in a directory of its own, ended with them; and tiers that talk to it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from ktransformer2.tiers.tier import Lineage
from ktransformer2.tiers.valkey import ValkeyTier
from ktransformer2.tiers.valkey_address import ValkeyAddress
from tests.tiers.disk_factories import lineage

KEY = b"a key of one deployment"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def server_binary() -> str:
    """The server that is installed; skips the test where none is."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        pytest.skip("no valkey-server or redis-server is installed")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def running_server(folder: Path, port: int, *options: str) -> Iterator[None]:
    """A server that listens on `port` (TCP, unless `options` say otherwise), keeps nothing and ends in any case."""
    listening = () if "--tls-port" in options else ("--port", str(port))
    command = [server_binary(), *listening, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_until_it_listens(process, port)
            yield
        finally:
            process.kill()


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        assert process.poll() is None, f"the server has ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return
    raise AssertionError("the server does not listen after 20 s")


def direct(port: int) -> Any:
    """A client of the test's own, past every tier."""
    return Redis(port=port)


@contextmanager
def tier(
    port: int, kind: Lineage | None = None, key: bytes = KEY, clock: Clock | None = None, **limits: Any
) -> Iterator[ValkeyTier]:
    """A tier on that port, without a thread; patient, unless `limits` say otherwise."""
    address = ValkeyAddress(f"valkey://127.0.0.1:{port}", **{"timeout_s": 5.0, **limits})
    opened = ValkeyTier(address, kind or lineage(), key, clock or Clock())
    try:
        yield opened
    finally:
        opened.close()
