"""A real server of its own for the tests, in a directory of its own, ended with them; and tiers that talk to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from ktransformer2.bench.valkey_server import server_program, wait_for
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
    found = server_program()
    if found is None:
        pytest.skip("no valkey-server or redis-server is installed")
    return found


@contextmanager
def running_server(folder: Path, port: int, *options: str) -> Iterator[None]:
    """A server that listens on `port` (TCP, unless `options` say otherwise), keeps nothing and ends in any case."""
    listening = () if "--tls-port" in options else ("--port", str(port))
    command = [server_binary(), *listening, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(process, port)
            yield
        finally:
            process.kill()


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
