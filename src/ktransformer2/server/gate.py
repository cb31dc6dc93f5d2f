"""The one gate in front of every route: host, origin, key, places, size of the body. Plain ASGI; knows no route.

Invariant: what passes has a `Caller` in `scope["state"]["caller"]`, and its place is given back whatever happens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ktransformer2.server.keys import Caller, Keys
from ktransformer2.server.limits import Ledger, Limits
from ktransformer2.server.problems import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_ROUTES = frozenset({"/health"})
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Gate:
    """Lets in whom `keys` knows."""

    def __init__(self, app: App, keys: Keys, limits: Limits, own_names: frozenset[str] | None) -> None:
        """`own_names`: what a Host header may say, without the port; None: anything."""
        self._app, self._keys, self._own_names = app, keys, own_names
        self._body_bytes = limits.body_bytes
        self._places = Ledger("requests", limits.concurrent)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        said = headers.get("x-request-id", "")
        request_id = said if _REQUEST_ID.fullmatch(said) else secrets.token_hex(12)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_origin(headers)
            caller = self._caller(scope["path"], headers)
            self._check_length(headers)
            self._places.take(caller.name, 1)
        except ApiError as error:
            await answer(error, sending)
            return
        scope.setdefault("state", {})["caller"] = caller
        try:
            await self._app(scope, self._counted(receive), sending)
        finally:
            self._places.give(caller.name, 1)

    def _check_origin(self, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self._own_names is not None and name not in self._own_names:
            raise _forbidden(f"this server is not {name[:80]!r}; ask 127.0.0.1", "wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise _forbidden("pages of another origin may not ask here", "wrong_origin")

    def _caller(self, path: str, headers: dict[str, str]) -> Caller:
        caller = self._keys.caller(headers.get("authorization", ""))
        if caller is None and path in OPEN_ROUTES:
            return Caller("nobody")
        if caller is None:
            raise ApiError(401, "wanted: Authorization: Bearer KEY", "invalid_api_key", kind="authentication_error")
        return caller

    def _check_length(self, headers: dict[str, str]) -> None:
        length = headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 15 or int(length) > self._body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is too large; allowed: {self._body_bytes:,} bytes", "body_too_large")

    def _counted(self, receive: Receive) -> Receive:
        """The body again, up to its limit: one that is sent in chunks says no length."""
        num_bytes = 0

        async def receiving() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._body_bytes:
                raise self._too_large()
            return message

        return receiving


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, code, kind="permission_error")


async def answer(error: ApiError, send: Send) -> None:
    """Send an error's body."""
    body = (json.dumps(error.body) + "\n").encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
