"""Where a shared tier lies and how patient one is with it: the URL taken apart and checked. Connects to nothing.

    valkey://[user[:password]@]host[:port][/database]       also redis://
    valkeys://...                                           the same over TLS; also rediss://
    unix:///path/to/socket[?db=database]

After `?`, over TLS: ssl_ca_certs, ssl_certfile, ssl_keyfile, each a file. The server's certificate is always checked.

Invariant: no message, no representation and no log line has the password, or a URL that could not be taken apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ktransformer2.errors import ConfigError

_PLAIN, _TLS, _SOCKET = ("valkey", "redis"), ("valkeys", "rediss"), ("unix",)
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PORT = 6379
_DAY_S = 86400.0
_FORM = "allowed: valkey://[user:password@]host[:port][/database], valkeys://... over TLS, unix:///path"


@dataclass(frozen=True)
class ValkeyAddress:
    """A server and the limits of talking to it. Raises ConfigError for what is not allowed.

    `ttl_s`: how long a block stays after its last use; the same in all processes of a deployment.
    `timeout_s`: how long to wait for a connection, and for the next bytes of an answer.
    `max_value_bytes`: a block that is larger is not sent. `bloom_refresh_s`: between two looks at what others wrote.
    """

    url: str = field(repr=False)
    ttl_s: float = 7 * _DAY_S
    timeout_s: float = 0.5
    max_value_bytes: int = 64 * 2**20
    bloom_refresh_s: float = 30.0

    def __post_init__(self) -> None:
        self._require("ttl_s", 1 <= self.ttl_s <= 3650 * _DAY_S, "1 to 315360000 (ten years)")
        self._require("timeout_s", 0 < self.timeout_s <= 60, "above 0, up to 60")
        self._require("max_value_bytes", 1 <= self.max_value_bytes <= 2**29, "1 to 536870912 (2^29)")
        self._require("bloom_refresh_s", 1 <= self.bloom_refresh_s <= _DAY_S, "1 to 86400")
        _ = self.options  # every part of the URL is looked at once

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}")

    @property
    def shown(self) -> str:
        """The address as people may see it: no user, no password, no files."""
        parts = self._parts()
        if parts.scheme in _SOCKET:
            return f"unix://{unquote(parts.path)}"
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{parts.scheme}://{host}:{parts.port or _PORT}/{self.options['db']}"

    @property
    def options(self) -> dict[str, Any]:
        """What the client is opened with: its own keyword arguments. Holds the password."""
        parts = self._parts()
        query = self._query(parts)
        database = query.get("db", "0") if parts.scheme in _SOCKET else unquote(parts.path).strip("/") or "0"
        if not (database.isascii() and database.isdigit() and len(database) <= 4):
            raise ConfigError(f"the database of a Valkey URL is not a number from 0 to 9999; {_FORM}")
        options: dict[str, Any] = {"db": int(database)}
        if parts.scheme in _SOCKET:
            options["unix_socket_path"] = unquote(parts.path)
        else:
            options |= {"host": parts.hostname, "port": parts.port or _PORT}
        if parts.username:
            options["username"] = unquote(parts.username)
        if parts.password:
            options["password"] = unquote(parts.password)
        if parts.scheme in _TLS:
            options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True, **query}
        return options

    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in (*_PLAIN, *_TLS, *_SOCKET) and not parts.fragment
            complete = bool(parts.path if parts.scheme in _SOCKET else parts.hostname)
            _ = parts.port  # raises where it is no number
        except ValueError:
            known = complete = False
        if not known or not complete:
            raise ConfigError(
                f"the URL of the Valkey server is not understood (not shown: it may hold a password); {_FORM}"
            )
        return parts

    def _query(self, parts: SplitResult) -> dict[str, str]:
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        names = _TLS_FILES if parts.scheme in _TLS else ("db",) if parts.scheme in _SOCKET else ()
        for name, value in query.items():
            if name not in names:
                allowed = ", ".join(names) or "nothing"
                raise ConfigError(f"{name[:40]!r} in the URL of the Valkey server is not allowed; allowed: {allowed}")
            if name in _TLS_FILES and not Path(value).is_file():
                raise ConfigError(f"{name}: no such file: {value}")
        return query
