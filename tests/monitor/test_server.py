"""The server beside a cache: what it answers, to whom, and what it does when the owner of the cache rests."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import ktransformer2.monitor
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import TierConfig
from ktransformer2.engine import troubles
from ktransformer2.errors import ConfigError
from ktransformer2.monitor import MetricsServer, health, routes, serve_metrics
from tests.cache.factories import Clock, start
from tests.monitor.conftest import TEXT
from tests.tiers.memory_tier import MemoryTier

Answer = tuple[int, Any]


def ask(server: MetricsServer, target: str, body: object = None, **headers: str) -> Answer:
    """(status, JSON or text)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", target, data, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if answer.getheader("Content-Type") == "application/json" else content


def error_of(answer: Answer) -> tuple[int, str]:
    status, content = answer
    assert set(content["error"]) == {"message", "type", "param", "code"}
    return status, content["error"]["code"]


@contextlib.contextmanager
def coming_by(cache: KVCache) -> Iterator[None]:
    """The owner's thread, which is this one, is lent: another one maintains meanwhile."""
    done = threading.Event()

    def maintain() -> None:
        while not done.wait(0.005):
            cache.maintain()
        cache.hand_over()

    cache.hand_over()
    owner = threading.Thread(target=maintain)
    owner.start()
    yield
    done.set()
    owner.join()


def test_stats_are_the_published_snapshot(cache: KVCache, server: MetricsServer, clock: Clock) -> None:
    published = cache.published
    clock.now = 3.0
    status, found = ask(server, "/v1/cache/stats")
    assert status == 200
    assert found["cache"] == published.as_json()
    assert (found["model"], found["age_s"]) == ("tiny", 3.0)
    assert [figure["name"] for figure in found["health"]] == [
        "hit rate", "growth per 1,000 tokens", "fragmentation", "prefetch accuracy",
    ]  # fmt: skip
    table = start(cache, TEXT)
    assert table is not None
    assert ask(server, "/v1/cache/stats")[1]["cache"]["lookup_tokens"] == published.lookup_tokens
    cache.maintain()
    assert ask(server, "/v1/cache/stats")[1]["cache"]["lookup_tokens"] == published.lookup_tokens + 200


def test_metrics_are_the_published_snapshot(cache: KVCache, server: MetricsServer) -> None:
    cache.clear()
    cache.maintain()
    status, text = ask(server, "/metrics")
    assert status == 200
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    stats = cache.published
    model = ("model_name", "tiny")
    assert all(model in labels for _, *labels in samples)
    assert samples["ktransformer_cache_hit_tokens_total", model] == stats.hit_tokens == 192
    assert samples["ktransformer_cache_findable_tokens_total", model] == 192
    assert samples["ktransformer_cache_evictions_total", ("cause", "clear"), model] == 12
    assert samples["ktransformer_cache_blocks", model, ("state", "cached")] == 0
    assert samples["ktransformer_cache_block_lifetime_seconds_count", model] == 12
    assert samples["ktransformer_cache_arena_calls_total", ("call", "commit"), model] == stats.arena_calls["commit"]
    held = sum(value for (name, *_), value in samples.items() if name == "ktransformer_cache_bytes")
    assert held == samples["ktransformer_cache_held_bytes", model] == stats.held_bytes


def test_openmetrics_for_those_who_ask_for_it(server: MetricsServer) -> None:
    status, text = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert text.endswith(b"# EOF\n")


def test_every_metric_that_the_alert_rules_name_exists(server: MetricsServer) -> None:
    rules = (Path(ktransformer2.monitor.__file__).parent / "alerts.yml").read_text(encoding="utf-8")
    (group,) = yaml.safe_load(rules)["groups"]
    named = {name for rule in group["rules"] for name in re.findall(r"\bktransformer_\w+", rule["expr"])}
    text = ask(server, "/metrics")[1].decode()
    served = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert named <= served
    assert len(group["rules"]) == 4
    assert all(rule["for"] == "5m" for rule in group["rules"])


def test_alert_rules_have_the_limits_and_guards_of_the_monitor(repository: Path) -> None:
    rules = (repository / "src" / "ktransformer2" / "monitor" / "alerts.yml").read_text(encoding="utf-8")
    for limit in (
        f"< {health.LEAST_HIT_RATIO}",
        f">= {health.LEAST_FINDABLE_TOKENS}",
        f">= {troubles.MOST_GROWTHS_PER_1K_TOKENS:g}",
        f">= {health.LEAST_GROWTHS}",
        f"> {troubles.MOST_FRAGMENTATION:.2f}",
        f">= {health.LEAST_BLOCKS}",
        f"< {health.LEAST_PREFETCH_ACCURACY}",
        f"> {health.MOST_PREFETCH_ACCURACY:.2f}",
    ):
        assert limit in rules


def test_explain_and_ls_are_answered_by_the_owner(cache: KVCache, server: MetricsServer) -> None:
    with coming_by(cache):
        status, found = ask(server, "/v1/cache/explain", {"token_ids": [*TEXT[:70], 99, *TEXT[71:]]})
        listed = ask(server, "/v1/cache/ls?limit=5")
        rest = ask(server, f"/v1/cache/ls?start={listed[1]['next_start']}")
    assert (status, found) == (
        200,
        {
            "prompt_tokens": 200,
            "hit_tokens": 64,
            "reason": "differs",
            "position": 70,
            "evicted_for": "",
            "evicted_ago_s": None,
            "tier": "",
            "text": "64 of 200 tokens found; token 70 is the first that differs from what the cache holds",
        },
    )
    assert [len(page["blocks"]) for _, page in (listed, rest)] == [5, 7]
    assert {block["state"] for block in listed[1]["blocks"]} == {"cached"}
    assert rest[1]["next_start"] is None


def test_a_salt_is_a_text(cache: KVCache, server: MetricsServer) -> None:
    with coming_by(cache):
        found = ask(server, "/v1/cache/explain", {"token_ids": TEXT, "salt": "tenant"})[1]
    assert found["reason"] == "other salt"


def test_an_owner_that_rests_is_not_waited_for_long(
    cache: KVCache, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "ASK_S", 0.05)
    answer = ask(server, "/v1/cache/explain", {"token_ids": TEXT})
    assert error_of(answer) == (503, "unavailable")
    assert "maintain()" in answer[1]["error"]["message"]
    assert ask(server, "/v1/cache/stats")[0] == 200  # figures need no owner
    cache.maintain()  # the question was withdrawn: nobody is disturbed by it


def test_a_cache_that_is_closed(cache: KVCache, server: MetricsServer) -> None:
    assert ask(server, "/health") == (200, {"status": "ok"})
    cache.close()
    assert error_of(ask(server, "/health")) == (503, "unavailable")
    assert error_of(ask(server, "/v1/cache/ls")) == (503, "unavailable")
    assert ask(server, "/metrics")[0] == 200


def _body(content: bytes) -> Callable[[MetricsServer], Answer]:
    return lambda server: ask(server, "/v1/cache/explain", content)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (lambda server: ask(server, "/v1/nothing"), (404, "not_found")),
        (lambda server: ask(server, "/metrics", b"{}"), (405, "method_not_allowed")),
        (lambda server: ask(server, "/v1/cache/explain"), (405, "method_not_allowed")),
        (lambda server: ask(server, "/v1/cache/ls?limit=-1"), (400, "invalid_request")),
        (lambda server: ask(server, "/v1/cache/ls?limit=1001"), (400, "invalid_request")),
        (lambda server: ask(server, "/v1/cache/ls?start=" + "9" * 5000), (400, "invalid_request")),
        (_body(b"not json"), (400, "invalid_request")),
        (_body(b"[" * 100_000), (400, "invalid_request")),
        (_body(b"[1, 2]"), (400, "invalid_request")),
        (_body(b'{"token_ids": []}'), (400, "invalid_request")),
        (_body(b'{"token_ids": [1, true]}'), (400, "invalid_request")),
        (_body(b'{"token_ids": [1, -2]}'), (400, "invalid_request")),
        (_body(b'{"token_ids": [1, 4294967296]}'), (400, "invalid_request")),
        (_body(b'{"token_ids": [1], "salt": 3}'), (400, "invalid_request")),
    ],
)  # fmt: skip
def test_a_wrong_request_is_told_so(
    server: MetricsServer, request_: Callable[[MetricsServer], Answer], expected: tuple[int, str]
) -> None:
    assert error_of(request_(server)) == expected


def raw(server: MetricsServer, lines: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(lines.replace("\n", "\r\n").encode())
        return connection.makefile("rb").readline()


@pytest.mark.parametrize(
    ("length", "status"),
    [("Content-Length: 99999999\n", b"413"), ("Content-Length: many\n", b"411"), ("", b"411")],
)
def test_bodies_are_bounded(server: MetricsServer, length: str, status: bytes) -> None:
    assert status in raw(server, f"POST /v1/cache/explain HTTP/1.1\nHost: localhost:1\n{length}\n")


def test_a_page_cannot_reach_it_by_a_name_of_its_own(server: MetricsServer) -> None:
    assert error_of(ask(server, "/metrics", Host="evil.example:80")) == (403, "wrong_host")
    assert b"403" in raw(server, "GET /metrics HTTP/1.0\n\n")
    assert ask(server, "/metrics", Host="localhost:1234")[0] == 200


def test_a_key_guards_every_route_but_health(cache: KVCache) -> None:
    with serve_metrics(cache, 0, key="s3cret") as server:
        for target in ("/metrics", "/v1/cache/stats", "/v1/cache/ls", "/v1/nothing"):
            assert error_of(ask(server, target)) == (401, "invalid_api_key")
            assert error_of(ask(server, target, Authorization="Bearer other")) == (401, "invalid_api_key")
        assert ask(server, "/health")[0] == 200
        assert ask(server, "/metrics", Authorization="Bearer s3cret")[0] == 200


def test_beyond_this_machine_only_with_a_key(cache: KVCache) -> None:
    with pytest.raises(ConfigError, match="give a key"):
        serve_metrics(cache, 0, host="0.0.0.0")
    with serve_metrics(cache, 0, host="0.0.0.0", key="s3cret") as server:
        assert ask(server, "/metrics", Host="cache.example", Authorization="Bearer s3cret")[0] == 200


def test_a_port_that_is_taken_or_none(cache: KVCache, server: MetricsServer) -> None:
    for port in (server.port, 70_000):
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*port=0"):
            serve_metrics(cache, port)


def test_closed_it_answers_no_more(cache: KVCache) -> None:
    server = serve_metrics(cache, 0)
    server.close()
    server.close()
    with pytest.raises(ConnectionError):
        ask(server, "/metrics")


def test_no_more_than_its_places_are_taken_at_once(server: MetricsServer) -> None:
    """Whoever connects and says nothing takes a place; past the last one the line is closed, until one is free."""
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(16)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as late:
        assert late.recv(1) == b""
    for connection in silent:
        connection.close()
    for _ in range(100):
        with contextlib.suppress(ConnectionError):
            if ask(server, "/health")[0] == 200:
                return
    pytest.fail("no place was given back")


def test_without_prometheus_client_the_error_says_what_to_install(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ktransformer2.monitor.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r'pip install "ktransformer2\[monitor\]"'):
        serve_metrics(cache, 0)


def test_the_manual_lists_every_metric_and_no_other(cache: KVCache, server: MetricsServer, repository: Path) -> None:
    cache.join([MemoryTier()], TierConfig())
    cache.maintain()
    manual = (repository / "docs" / "monitoring.md").read_text(encoding="utf-8")
    rows = manual.partition("## Metrics")[2].partition("```")[0]
    listed = set(re.findall(r"`(\w+)(?:\{\w+\})?`", "".join(re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE))))
    text = ask(server, "/metrics")[1].decode()
    families = [family for family in text_string_to_metric_families(text) if family.samples or family.type == "counter"]
    served = {family.name + "_total" * (family.type == "counter") for family in families}
    assert {f"ktransformer_cache_{name}" for name in listed} == served


def test_the_manual_shows_what_the_monitor_shows(repository: Path) -> None:
    manual = (repository / "docs" / "monitoring.md").read_text(encoding="utf-8")
    shown = (repository / "tests" / "snapshots" / "monitor-cache_stats.txt").read_text(encoding="utf-8")
    part = manual.partition("figures 0.4 s old\n")[2].partition("...")[0]
    assert part
    assert part in shown
