"""Chats played against an OpenAI-compatible server, and when each token came. Knows the protocol and no server.

Open loop: chats begin at the times they are given, however long the others take; inside a chat a turn waits for the one
before, as a person does. A thread a chat, on plain sockets: what it costs is little beside what it measures.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from ktransformer2.errors import ConfigError, NoServerError

_SOCKET_S = 300.0


@dataclass(frozen=True)
class Endpoint:
    """Where to ask: an address such as http://127.0.0.1:8765, or one that ends in /v1; a key, if one is wanted."""

    url: str
    key: str = ""

    def __post_init__(self) -> None:
        """Raises: ConfigError for an address that is none."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no address; write it as http://127.0.0.1:8765")

    @contextmanager
    def ask(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        """The answer, until the end of the block. Raises: OSError."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_SOCKET_S)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        base = parts.path.rstrip("/").removesuffix("/v1")
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, f"{base}/v1{path}", data, headers)
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()

    def model(self) -> tuple[str, int]:
        """The first model's id, and the tokens of a block where the server says so, else 1. Raises: NoServerError."""
        try:
            with self.ask("GET", "/models") as answer:
                found = json.loads(answer.read())
            first = found["data"][0]
            return str(first["id"]), int((first.get("meta") or {}).get("block_tokens", 1))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise NoServerError(f"no models are listed at {self.url} ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Turn:
    """One question and its answer. Seconds; `gaps_s` lie between tokens; `error`: what went wrong, else empty."""

    chat: int
    number: int
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Load:
    """`chats`: the questions of each; `starts_s`: when each begins, from the start of the replay."""

    chats: Sequence[Sequence[str]]
    starts_s: Sequence[float]
    max_new_tokens: int


def replay(endpoint: Endpoint, model: str, load: Load) -> list[Turn]:
    """Every turn of every chat. A chat ends at its first error. Side effect: sends requests."""
    began_s = time.perf_counter()

    def play(chat: int) -> list[Turn]:
        time.sleep(max(0.0, began_s + load.starts_s[chat] - time.perf_counter()))
        messages: list[dict[str, str]] = []
        turns: list[Turn] = []
        for number, question in enumerate(load.chats[chat]):
            messages.append({"role": "user", "content": question})
            body = {"model": model, "messages": messages, "max_tokens": load.max_new_tokens, "temperature": 0}
            turn, text = _ask(endpoint, body, Turn(chat, number))
            turns.append(turn)
            if turn.error:
                break
            messages.append({"role": "assistant", "content": text})
        return turns

    with ThreadPoolExecutor(len(load.chats)) as threads:
        return [turn for turns in threads.map(play, range(len(load.chats))) for turn in turns]


def _ask(endpoint: Endpoint, body: dict[str, Any], turn: Turn) -> tuple[Turn, str]:
    """The turn with its times, and the answer's text."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    asked_s = time.perf_counter()
    times: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    try:
        with endpoint.ask("POST", "/chat/completions", body) as answer:
            if answer.status != 200:
                said = answer.read()[:200].decode(errors="replace")
                return dataclasses.replace(turn, error=f"{answer.status}: {said}"), ""
            for event in _events(answer):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        times.append(time.perf_counter())
                        texts.append(text)
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        return dataclasses.replace(turn, error=f"{type(error).__name__}: {error}"), ""
    details = usage.get("prompt_tokens_details") or {}
    read = dataclasses.replace(
        turn,
        ttft_s=(times[0] if times else time.perf_counter()) - asked_s,
        gaps_s=tuple(b - a for a, b in pairwise(times)),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        new_tokens=usage.get("completion_tokens", 0),
    )
    return read, "".join(texts)


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of every event up to [DONE]; comments are passed over. Raises: ValueError for an error, or no [DONE]."""
    for line in answer:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if line.startswith(b"data: "):
            event = json.loads(data)
            if "error" in event:
                raise ValueError(str(event["error"])[:200])
            yield event
    raise ValueError("the stream broke off before [DONE]")
