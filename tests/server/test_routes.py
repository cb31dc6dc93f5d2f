"""The other routes, errors everywhere in OpenAI's form, disconnects, a crash: over HTTP."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from ktransformer2 import __version__
from ktransformer2.engine.llm import LLM
from ktransformer2.engine.outputs import EngineStats
from ktransformer2.models.loading import LoadedModel
from ktransformer2.monitor.client import MonitorClient, Observation
from ktransformer2.server.status_line import status_line
from tests.cli.invoking import assert_as_before
from tests.server.serving import BLOCK, Served, opened, served

LONG = {"model": "tiny", "prompt": "long", "max_tokens": 2000, "ignore_eos": True}


def test_models_have_their_context_and_every_name(server: Served) -> None:
    models = server.openai.models.list().data
    assert [model.id for model in models] == ["tiny", "alias"]
    one = server.openai.models.retrieve("alias").model_extra or {}
    assert one["max_model_len"] == one["meta"]["n_ctx"] > 1000
    assert (one["root"], one["meta"]["kv"], one["meta"]["block_tokens"]) == ("tiny", "fp32", BLOCK)


def test_tokens_there_and_back(server: Served) -> None:
    found = server.http.post("/tokenize", json={"content": "Hé", "with_pieces": True}).json()
    assert (found["count"], len(found["tokens"])) == (3, 3)
    assert found["pieces"] == ["H", "\ufffd", "\ufffd"]
    assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json()["content"] == "Hé"
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["count"] == len("user: Hi\nassistant: ")


def test_version_and_metrics(server: Served) -> None:
    assert server.http.get("/version").json() == {"version": __version__}
    server.http.post("/v1/completions", json={"model": "tiny", "prompt": "xylophone", "max_tokens": 1})
    text = server.http.get("/metrics").text
    assert 'ktransformer_engine_running_sequences{model_name="tiny"}' in text
    assert 'ktransformer_cache_hit_tokens_total{model_name="tiny"}' in text
    assert "xylophone" not in text


def test_a_prompt_is_explained_pinned_and_unpinned(server: Served) -> None:
    prompt = "pin me, I am the text that all the others begin with"
    body = {"prompt": prompt}
    assert server.http.post("/v1/cache/pin", json=body).json()["error"]["code"] == "nothing_cached"
    server.http.post("/v1/completions", json={"model": "tiny", **body, "max_tokens": 1})
    explained = server.http.post("/v1/cache/explain", json=body).json()
    assert (explained["hit_tokens"], explained["reason"]) == (len(prompt) - 1, "found")
    pin = server.http.post("/v1/cache/pin", json=body).json()
    assert pin["num_tokens"] == len(prompt) // BLOCK * BLOCK
    assert server.http.get("/v1/cache/pins").json() == {"data": [pin]}
    assert server.http.delete(f"/v1/cache/pin/{pin['id']}").json() == {"id": pin["id"], "deleted": True}
    assert server.http.delete(f"/v1/cache/pin/{pin['id']}").status_code == 404
    entries = server.http.get("/v1/cache/entries?limit=2").json()
    assert len(entries["blocks"]) == 2


def test_the_commands_that_look_at_a_cache_understand_this_server(server: Served) -> None:
    server.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "looked at from outside, by a command", "max_tokens": 1}
    )
    client = MonitorClient(server.url)
    assert Observation.from_json(client.stats()).model == "tiny"
    assert client.blocks(0, 1)["blocks"]
    ids = list(b"never asked")
    assert client.explain(ids)["prompt_tokens"] == len(ids)


def test_half_characters_in_what_is_echoed_do_no_harm(server: Served) -> None:
    body = b'{"model": "tiny", "input": "x", "max_output_tokens": 1, "text": {"note": "\\ud800"}}'
    answer = server.http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.json()["text"] == {"note": "\ud800"}


WRONG: list[tuple[str, str, Any]] = [
    ("unknown-route", "/v1/nothing", None),
    ("wrong-method", "/v1/completions", None),
    ("no-json", "/v1/completions", b"{"),
    ("no-model", "/v1/completions", {"prompt": "x"}),
    ("unknown-model", "/v1/completions", {"model": "gpt-4", "prompt": "x"}),
    ("temperature", "/v1/completions", {"model": "tiny", "prompt": "x", "temperature": -1}),
    ("empty-prompt", "/v1/completions", {"model": "tiny", "prompt": ""}),
    ("half-character", "/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}'),
    ("echo", "/v1/completions", {"model": "tiny", "prompt": "x", "echo": True}),
    ("token-id", "/v1/completions", {"model": "tiny", "prompt": [99999999]}),
    ("too-long", "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 10**7}),
    ("logit-bias", "/v1/completions", {"model": "tiny", "prompt": "x", "logit_bias": {"a": 1}}),
    ("no-messages", "/v1/chat/completions", {"model": "tiny", "messages": []}),
    (
        "image",
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
    ),
    ("no-role", "/v1/chat/completions", {"model": "tiny", "messages": [{"content": "x"}]}),
    (
        "tool-calls",
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "x", "tool_calls": 1}]},
    ),
    (
        "tool-choice",
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
    ),
    ("two-prompts", "/tokenize", {"content": "x", "prompt": "x"}),
    ("negative-token", "/detokenize", {"tokens": [-1]}),
    ("entries", "/v1/cache/entries?limit=0", None),
    ("no-prompt", "/v1/cache/explain", {}),
]


def test_every_error_has_the_same_form_and_says_what_to_do(server: Served) -> None:
    lines = []
    for name, path, body in WRONG:
        if body is None:
            answer = server.http.get(path)
        elif isinstance(body, bytes):
            answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
        else:
            answer = server.http.post(path, json=body)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        lines.append(
            f"{name}: {answer.status_code} {error['type']} {error['code']} {error['param']}\n  {error['message']}\n"
        )
    assert_as_before("server-errors", "".join(lines))


def test_the_openapi_file(server: Served) -> None:
    found = server.http.get("/openapi.json").json()
    lines = [f"{method.upper()} {path}\n" for path, methods in found["paths"].items() for method in methods]
    for name, schema in sorted(found["components"]["schemas"].items()):
        lines.append(f"{name}: {', '.join(schema.get('properties', {}))}\n")
    assert_as_before("server-openapi", "".join(lines))


def test_a_client_that_leaves_a_stream_gives_its_blocks_back(server: Served) -> None:
    before = server.engine.stats.num_cancelled
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_bytes())
    server.rests()
    assert server.engine.stats.num_cancelled == before + 1


def test_a_client_that_leaves_before_the_answer_gives_its_blocks_back(server: Served) -> None:
    before = server.engine.stats.num_cancelled
    with httpx2.Client(base_url=server.url, timeout=0.3) as client, pytest.raises(httpx2.TimeoutException):
        client.post("/v1/completions", json=LONG)
    server.rests()
    assert server.engine.stats.num_cancelled == before + 1


def test_health_says_that_the_model_loads_and_then_that_it_is_there(loaded: LoadedModel) -> None:
    go_on = threading.Event()

    def slow() -> LLM:
        go_on.wait()
        return opened(loaded)

    with served(slow, wait=False) as server:
        loading = server.http.get("/health")
        go_on.set()
        while (answer := server.http.get("/health")).status_code == 503:
            pass
    assert loading.status_code == 503
    assert loading.json()["error"] == {
        "message": "Loading model",
        "type": "unavailable_error",
        "param": None,
        "code": 503,
    }
    assert answer.json() == {"status": "ok"}


def test_a_crash_ends_a_stream_with_an_error_and_health_says_so(loaded: LoadedModel) -> None:
    llms: list[LLM] = []

    def open_llm() -> LLM:
        llms.append(opened(loaded))
        return llms[0]

    def forward(batch: object) -> None:
        raise RuntimeError("the device is gone")

    with served(open_llm) as server:
        stream = server.openai.completions.create(
            model="tiny", prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        llms[0].engine._model = SimpleNamespace(forward=forward)  # all that is asked of it
        with pytest.raises(openai.APIError, match=r"the engine has failed \(RuntimeError\)"):
            list(stream)
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["message"] == "the engine has failed (RuntimeError)"
        assert server.http.get("/v1/models").status_code == 503


def test_the_status_line_says_what_happened() -> None:
    before, idle = EngineStats(), EngineStats()
    assert status_line(before, idle, 10) == ""
    now = EngineStats(
        num_running=2, num_waiting=1, prompt_tokens=400, cached_tokens=100, prefill_tokens=300, decode_tokens=50
    )
    assert (
        status_line(before, now, 10) == "2 running, 1 waiting | 30 tok/s read, 5 written | 25 % of new prompts cached"
    )
