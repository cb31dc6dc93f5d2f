"""Reading a cache over HTTP, and what is said where that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.errors import ConfigError, KTransformerError, NoServerError
from ktransformer2.monitor import MetricsServer, mock, routes, serve_metrics
from ktransformer2.monitor.client import MonitorClient, Observation
from tests.monitor.conftest import TEXT


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_what_is_read_is_what_was_published(cache: KVCache, server: MetricsServer) -> None:
    seen = Observation.from_json(MonitorClient(server.url + "/").stats())
    assert seen == Observation("tiny", 0.0, cache.published)


def test_nobody_there(server: MetricsServer) -> None:
    server.close()
    with pytest.raises(NoServerError, match=r"no server answers at http://127.0.0.1:\d+ .*serve_metrics.*--url"):
        MonitorClient(server.url).stats()


@pytest.mark.parametrize("url", ["127.0.0.1:8765", "ftp://host", "http://", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address; write it as"):
        MonitorClient(url)


def test_a_key_is_asked_for_and_sent(cache: KVCache) -> None:
    with serve_metrics(cache, 0, key="s3cret") as server:
        with pytest.raises(ConfigError, match="--key-file"):
            MonitorClient(server.url).stats()
        assert MonitorClient(server.url, "s3cret").stats()["age_s"] == 0.0


def test_an_owner_that_rests_is_no_wrong_usage(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ASK_S", 0.05)
    with pytest.raises(KTransformerError, match="cannot answer now: the owner of the cache") as raised:
        MonitorClient(server.url).explain(TEXT)
    assert not isinstance(raised.value, ConfigError)


def test_a_wrong_request_is_told_as_the_server_tells_it(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match="refuses: limit='5000' is not allowed"):
        MonitorClient(server.url).blocks(0, 5000)


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, b"<html>", "that is no JSON"),
        (200, b"[]", "no JSON object"),
        (404, b"<html>", "answers 404, but not as a cache does"),
        (404, b'{"error": "text"}', "answers 404, but not as a cache does"),
    ],
)
def test_another_kind_of_server(status: int, body: bytes, why: str) -> None:
    with answering(status, body) as url, pytest.raises(ConfigError, match=why):
        MonitorClient(url).stats()


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        ({"cache": {}}, "no snapshot of this version"),
        ({"age_s": "old"}, "`age_s` must be a number"),
        ({"model": None}, "`model` a text"),
    ],
)
def test_an_answer_that_is_none(spoilt: dict[str, object], why: str) -> None:
    assert Observation.from_json(mock.answer(0)).model == mock.MODEL
    with pytest.raises(ConfigError, match=why):
        Observation.from_json(mock.answer(0) | spoilt)
    with pytest.raises(ConfigError, match="it has no `cache`"):
        Observation.from_json({"error": 1})


def test_a_proxy_is_not_asked_for_this_machine(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert MonitorClient(server.url).stats()["model"] == "tiny"
