"""A small HTTP server beside a cache: daemon threads that answer `CacheRoutes`. Knows no route and no figure.

Safe by default: it listens on this machine only, and beyond that not without a key; a page in a browser cannot reach it
through a name of its own. Bounded: body, waiting, and how many are answered at once.
"""

from __future__ import annotations

import hmac
import ipaddress
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from ktransformer2.errors import ConfigError
from ktransformer2.monitor.routes import CacheRoutes, HttpError, HttpRequest, HttpResponse

if TYPE_CHECKING:
    from ktransformer2.cache.kv_cache import KVCache

DEFAULT_PORT = 8765
_MOST_BODY_BYTES = 16 * 2**20
_MOST_AT_ONCE = 16
_SOCKET_S = 5.0
_OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")


def serve_metrics(
    cache: KVCache,
    port: int = DEFAULT_PORT,
    *,
    host: str = "127.0.0.1",
    key: str = "",
    model_name: str = "",
) -> MetricsServer:
    """Serve the figures of `cache` until the result is closed; `LLM` and `Attachment` have theirs as `.cache`.

    `port` 0: a free one. `key`: wanted as `Authorization: Bearer KEY` on every route but /health; needed for a `host`
    beyond this machine. `model_name`: the label of every metric.
    Raises: ConfigError for a taken port, a host without a key, and without prometheus-client.
    """
    from ktransformer2.monitor.prometheus import exposition

    if not key and not _is_loopback(host):
        raise ConfigError(f"host={host!r} is reached from other machines: give a key, or host='127.0.0.1'")
    routes = CacheRoutes(cache, model_name, exposition(cache, model_name))
    return MetricsServer(host, port, routes.answer, key)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class MetricsServer:
    """A running server. `url`: where it is; close it, or leave its `with`, to stop it."""

    def __init__(self, host: str, port: int, answer: Callable[[HttpRequest], HttpResponse], key: str = "") -> None:
        """Side effects: listens; one daemon thread waits. Raises: ConfigError."""
        try:
            self._http = _Http((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error}); name another port, or port=0 for a free one"
            ) from error
        self._http.answer, self._http.key = answer, key
        self._http.own_names = {host, *_OWN_NAMES} if _is_loopback(host) else None
        self.port: int = self._http.server_address[1]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, name="ktransformer-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Http(ThreadingHTTPServer):
    """Threads up to a bound; whoever comes then is hung up on."""

    daemon_threads = True
    block_on_close = False
    answer: Callable[[HttpRequest], HttpResponse]
    key: str
    own_names: set[str] | None  # what a Host header may say; None: anything

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that left or fell silent is no error of ours."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    server_version = "ktransformer"
    sys_version = ""
    timeout = _SOCKET_S

    def do_GET(self) -> None:
        self._respond("GET")

    def do_POST(self) -> None:
        self._respond("POST")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scrape every few seconds is no news."""

    def _respond(self, method: str) -> None:
        try:
            self._check_caller()
            request = HttpRequest(method, self.path, self.headers.get("Accept", ""), self._body(method))
            response = self.server.answer(request)
        except HttpError as error:
            response = error.response
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(response.body)

    def _check_caller(self) -> None:
        name, names = self.headers.get("Host", "").rsplit(":", 1)[0], self.server.own_names
        if names is not None and name not in names:
            raise HttpError(403, "permission_error", f"this server is not {name!r}; ask 127.0.0.1", "wrong_host")
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        is_open = not self.server.key or self.path == "/health"
        if not is_open and not hmac.compare_digest(given.encode(), self.server.key.encode()):
            raise HttpError(401, "authentication_error", "wanted: Authorization: Bearer KEY", "invalid_api_key")

    def _body(self, method: str) -> bytes:
        if method == "GET":
            return b""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise HttpError(411, "invalid_request_error", "a body needs its Content-Length", "length_required")
        if len(length) > 12 or int(length) > _MOST_BODY_BYTES:
            message = f"a body of {length[:20]} bytes; allowed: {_MOST_BODY_BYTES:,}"
            raise HttpError(413, "invalid_request_error", message, "too_large")
        return self.rfile.read(int(length))
