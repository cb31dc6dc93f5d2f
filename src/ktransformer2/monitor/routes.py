"""What a cache answers over HTTP, without a server: a request in, a response out. Called from any thread.

    GET  /metrics            Prometheus text, from the published snapshot
    GET  /v1/cache/stats     the same snapshot as JSON, with its age and the four health figures
    GET  /v1/cache/ls        blocks one by one: ?start=0&limit=100
    POST /v1/cache/explain   {"token_ids": [...], "salt": "..."}: why the cache has no more of them
    GET  /health             200 while the cache is open

The first two read `KVCache.published`. `ls` and `explain` look at the cache itself, so they wait for its owner to come
by (`KVCache.ask`), at most `ASK_S`: the answer of an owner that rests is 503.

Invariants: no answer holds text or token ids; a wrong request is answered, never raised.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as AnswerTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from ktransformer2.errors import EngineClosedError, KTransformerError, QueueFullError, RequestError
from ktransformer2.monitor.health import health

if TYPE_CHECKING:
    from ktransformer2.cache.kv_cache import KVCache

ASK_S = 2.0
MOST_TOKENS = 2**20
MOST_BLOCKS = 1000
T = TypeVar("T")


@dataclass(frozen=True)
class HttpRequest:
    """`target`: path and query as they came; `accept`: the header."""

    method: str
    target: str
    accept: str = ""
    body: bytes = b""


@dataclass(frozen=True)
class HttpResponse:
    status: int
    body: bytes
    content_type: str = "application/json"


class HttpError(Exception):
    """An answer that is no success. `kind` and `code` are the two names that clients look at."""

    def __init__(self, status: int, kind: str, message: str, code: str) -> None:
        super().__init__(message)
        self.response = json_response(
            status, {"error": {"message": message, "type": kind, "param": None, "code": code}}
        )


def json_response(status: int, value: object) -> HttpResponse:
    return HttpResponse(status, (json.dumps(value) + "\n").encode())


class CacheRoutes:
    """The routes of one cache. `scrape` makes the Prometheus text."""

    def __init__(self, cache: KVCache, model_name: str, scrape: Callable[[str], tuple[bytes, str]]) -> None:
        self._cache, self._model_name, self._scrape = cache, model_name, scrape
        self._routes: Mapping[str, tuple[str, Callable[[HttpRequest], HttpResponse]]] = {
            "/metrics": ("GET", self._metrics),
            "/v1/cache/stats": ("GET", self._stats),
            "/v1/cache/ls": ("GET", self._ls),
            "/v1/cache/explain": ("POST", self._explain),
            "/health": ("GET", self._health),
        }

    def answer(self, request: HttpRequest) -> HttpResponse:
        path = urlsplit(request.target).path
        try:
            if path not in self._routes:
                known = ", ".join(self._routes)
                raise HttpError(404, "invalid_request_error", f"nothing is at {path}; there are: {known}", "not_found")
            method, route = self._routes[path]
            if request.method != method:
                raise HttpError(405, "invalid_request_error", f"{path} takes {method} only", "method_not_allowed")
            return route(request)
        except HttpError as error:
            return error.response
        except RequestError as error:
            return HttpError(400, "invalid_request_error", str(error), "invalid_request").response

    def _metrics(self, request: HttpRequest) -> HttpResponse:
        body, content_type = self._scrape(request.accept)
        return HttpResponse(200, body, content_type)

    def _stats(self, request: HttpRequest) -> HttpResponse:
        stats = self._cache.published
        return json_response(
            200,
            {
                "model": self._model_name,
                "age_s": self._cache.published_age_s(),
                "health": [dataclasses.asdict(figure) for figure in health(stats)],
                "cache": stats.as_json(),
            },
        )

    def _ls(self, request: HttpRequest) -> HttpResponse:
        query = parse_qs(urlsplit(request.target).query)
        start, limit = _number(query, "start", 0, 2**31), _number(query, "limit", 100, MOST_BLOCKS)
        page = self._asked(lambda cache: cache.list_blocks(start, limit))
        return json_response(200, dataclasses.asdict(page))

    def _explain(self, request: HttpRequest) -> HttpResponse:
        token_ids, salt = _prompt(request.body)
        found = self._asked(lambda cache: cache.explain(token_ids, salt))
        return json_response(200, dataclasses.asdict(found) | {"text": str(found)})

    def _health(self, request: HttpRequest) -> HttpResponse:
        if self._cache.closed:
            raise _unavailable("the cache was closed")
        return json_response(200, {"status": "ok"})

    def _asked(self, question: Callable[[KVCache], T]) -> T:
        """What the owner answers."""
        try:
            answer = self._cache.ask(question)
        except (QueueFullError, EngineClosedError) as error:
            raise _unavailable(str(error)) from error
        try:
            return answer.result(ASK_S)
        except AnswerTimeoutError as error:
            answer.cancel()
            raise _unavailable(
                f"the owner of the cache did not come by within {ASK_S:g} s: it rests, or a step takes long. While it "
                "rests it answers from maintain(); else ask again"
            ) from error
        except RequestError:
            raise
        except KTransformerError as error:
            raise _unavailable(str(error)) from error


def _unavailable(message: str) -> HttpError:
    return HttpError(503, "unavailable_error", message, "unavailable")


def _number(query: Mapping[str, list[str]], name: str, default: int, most: int) -> int:
    (text,) = query.get(name, [str(default)])[-1:]
    if not text.isascii() or not text.isdigit() or not int(text[:12]) <= most:
        raise RequestError(f"{name}={text[:40]!r} is not allowed; allowed: a whole number up to {most:,}")
    return int(text)


def _prompt(body: bytes) -> tuple[list[int], bytes]:
    """Token ids and salt of an `explain`. Raises RequestError."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON ({error})") from error
    ids = found.get("token_ids") if isinstance(found, dict) else None
    salt = found.get("salt", "") if isinstance(found, dict) else None
    if not isinstance(ids, list) or not 1 <= len(ids) <= MOST_TOKENS or not isinstance(salt, str):
        raise RequestError(
            f'the body must be {{"token_ids": [...], "salt": "..."}} with 1 to {MOST_TOKENS:,} token ids; the salt is '
            "a text and may be left out"
        )
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < 2**31:
            raise RequestError(f"token_ids[{place}] is no token id; allowed: whole numbers from 0 to 2^31 - 1")
    return ids, salt.encode("utf-8", "surrogatepass")
