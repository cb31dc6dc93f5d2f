"""From options to a server that runs until it is told to stop: a socket, a key where one is needed, uvicorn.

Safe by default: it listens on this machine only; beyond it a key is wanted, and where none is given one is made.
"""

from __future__ import annotations

import ipaddress
import math
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ktransformer2.engine.llm import LLM
from ktransformer2.errors import ConfigError
from ktransformer2.server.app import Access, make_app
from ktransformer2.server.engine_thread import EngineThread
from ktransformer2.server.gate import LOOPBACK_NAMES
from ktransformer2.server.keys import Keys
from ktransformer2.server.limits import Limits

DEFAULT_PORT = 8765
_GRACE_S = 5  # in which a client takes the end of a stream


@dataclass(frozen=True)
class Address:
    """Where to listen. `port` 0: a free one."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True)
class Opened:
    """What has been settled before the model is loaded. `made_key`: the key that was made here; empty: none was."""

    url: str
    listener: socket.socket
    access: Access
    made_key: str = ""


def open_address(address: Address, key_file: Path | None = None, *, share_prefixes: bool = False) -> Opened:
    """Side effect: listens. Raises: ConfigError for a taken port and a key file that is none."""
    made_key = ""
    if key_file is not None:
        keys = Keys.read(key_file, share_prefixes=share_prefixes)
    elif address.is_loopback:
        keys = Keys()
    else:
        keys, made_key = Keys.made()
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.create_server((address.host, address.port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port} ({error}); name another port, or --port 0 for a free one"
        ) from error
    own_names = frozenset({address.host}) | LOOPBACK_NAMES if address.is_loopback else None
    shown = f"[{address.host}]" if ":" in address.host else address.host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    return Opened(url, listener, Access(keys, own_names), made_key)


def run(opened: Opened, open_llm: Callable[[], LLM], names: list[str], limits: Limits) -> None:
    """Serve until SIGINT or SIGTERM, then let running answers end. `open_llm` is called in the engine's thread.

    Raises: what `open_llm` raises. Side effect: a signal that ended it is not raised again.
    """
    errors: list[Exception] = []

    def opening() -> LLM:
        try:
            return open_llm()
        except Exception as error:
            errors.append(error)
            server.should_exit = True
            raise

    engine = EngineThread(opening)
    server = make_server(opened, engine, names, limits)
    # uvicorn raises the signal that stopped it once more, for whoever had it before.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run([opened.listener])
    finally:
        # A second signal skips the shutdown above: nothing may close the cache under a running step.
        engine.begin_stop(0.0)
        engine.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    if errors:
        raise errors[0]


def make_server(opened: Opened, engine: EngineThread, names: list[str], limits: Limits) -> uvicorn.Server:
    """A server that has not begun. Its shutdown stops `engine`."""
    app = make_app(engine, names, opened.access, limits)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(limits.drain_s) + _GRACE_S,
    )
    return _Server(config, engine, limits.drain_s)


class _Server(uvicorn.Server):
    """The engine's drain begins with the server's, so that streams past it end with an error and not in the middle."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread, drain_s: float) -> None:
        super().__init__(config)
        self._engine, self._drain_s = engine, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.begin_stop(self._drain_s)
        await super().shutdown(sockets)
