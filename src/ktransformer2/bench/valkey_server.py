"""A Valkey or Redis server of a scenario's own, on this machine, gone when the scenario is."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_S = 20.0


def server_program() -> str | None:
    """The server that is installed, where the client is too."""
    if importlib.util.find_spec("redis") is None:
        return None
    return shutil.which("valkey-server") or shutil.which("redis-server")


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, Path]]:
    """(URL, file with a deployment's key) of a server that keeps nothing on disk.

    Raises: RuntimeError where it does not start.
    """
    program = server_program()
    assert program is not None, "ask `server_program` before"
    key_file = folder / "key"
    key_file.write_text(secrets.token_hex(32))
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(process, port)
            yield f"valkey://127.0.0.1:{port}", key_file
        finally:
            process.kill()


def free_port() -> int:
    """A port of this machine that nobody listens on at present."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def wait_for(process: subprocess.Popen[bytes], port: int, limit_s: float = _START_S) -> None:
    """Until a program that was started listens. Raises: RuntimeError where it has ended, or takes too long."""
    until = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return
    raise RuntimeError(f"{process.args!r} does not listen on port {port}: it has ended with {process.poll()}")
