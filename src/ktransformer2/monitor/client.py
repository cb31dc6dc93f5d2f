"""Reading a running cache over HTTP. Knows addresses and answers; judges and draws nothing."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from ktransformer2.cache.stats import CacheStats
from ktransformer2.errors import ConfigError, KTransformerError, NoServerError

DEFAULT_URL = "http://127.0.0.1:8765"
_WAIT_S = 10.0
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Observation:
    """What a server said of its cache. `age_s`: how old the snapshot was then."""

    model: str
    age_s: float
    stats: CacheStats

    @classmethod
    def from_json(cls, found: object) -> Self:
        """An answer of /v1/cache/stats. Raises ConfigError."""
        if not isinstance(found, Mapping) or "cache" not in found:
            raise ConfigError("that is no answer of /v1/cache/stats: it has no `cache`")
        age, model = found.get("age_s"), found.get("model")
        if isinstance(age, bool) or not isinstance(age, int | float) or not isinstance(model, str):
            raise ConfigError("that is no answer of /v1/cache/stats: `age_s` must be a number and `model` a text")
        return cls(model, age, CacheStats.from_json(found["cache"]))


class MonitorClient:
    """One server, by its address, such as http://127.0.0.1:8765. `key`: where the server wants one."""

    def __init__(self, url: str = DEFAULT_URL, key: str = "") -> None:
        """Raises: ConfigError for an address that is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address; write it as {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self._key = key
        # A proxy of the system's cannot know this machine's own address.
        own = parts.hostname in ("127.0.0.1", "localhost", "::1")
        proxies = [urllib.request.ProxyHandler({})] if own else []
        self._opener = urllib.request.build_opener(*proxies)

    def stats(self) -> dict[str, Any]:
        """An answer of /v1/cache/stats, for `Observation.from_json`. Raises: NoServerError, ConfigError."""
        return self._ask("/v1/cache/stats")

    def blocks(self, start: int, limit: int) -> dict[str, Any]:
        """Raises: NoServerError, ConfigError; KTransformerError when the cache's owner does not come by."""
        return self._ask(f"/v1/cache/ls?start={start}&limit={limit}")

    def explain(self, token_ids: list[int], salt: str = "") -> dict[str, Any]:
        """Raises: as `blocks`."""
        return self._ask("/v1/cache/explain", {"token_ids": token_ids, "salt": salt})

    def _ask(self, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Accept": "application/json"})
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=_WAIT_S) as answer:
                return self._read(answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read(_MOST_BYTES)) from error
        except (OSError, http.client.HTTPException) as error:  # a URLError is an OSError
            raise self._no_server(getattr(error, "reason", error)) from error

    def _read(self, body: bytes) -> dict[str, Any]:
        try:
            found = json.loads(body)
        except ValueError as error:
            raise ConfigError(f"{self.url} answers, but not as a cache does: that is no JSON") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{self.url} answers, but not as a cache does: that is no JSON object")
        return found

    def _refused(self, status: int, body: bytes) -> KTransformerError:
        try:
            message = str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return ConfigError(f"{self.url} answers {status}, but not as a cache does; is that the right address?")
        if status == 401:
            return ConfigError(f"{self.url} wants a key: name a file that holds it with --key-file")
        if status >= 500:
            return KTransformerError(f"{self.url} cannot answer now: {message}")
        return ConfigError(f"{self.url} refuses: {message}")

    def _no_server(self, reason: object) -> NoServerError:
        return NoServerError(
            f"no server answers at {self.url} ({reason}); start one in the process that has the cache, with "
            "ktransformer2.monitor.serve_metrics(llm.cache, port=8765), or name another address with --url"
        )
