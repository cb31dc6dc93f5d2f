"""The bench of long prefixes, on a small random model: in memory, restored, from a server, beside a rival.

What it runs in processes of their own runs here in this one, but for one test: starting them is most of their time.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ktransformer2.bench import llama_slots, xllamacpp_server
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.prefix import prefix_tokens, run
from ktransformer2.bench.prefix_process import Task, perform
from ktransformer2.bench.targets import targets_of
from ktransformer2.bench.valkey_server import server_program

RESTART = {"restart_speedup", "restart_reused_share", "restart_vs_handmade"}
VALKEY = {"valkey_speedup"}
SALT = {"salt_foreign_tokens", "salt_own_share", "salt_time_difference"}
# What llama-server says and does, as far as the bench asks it: a slot is the prompt that was read last.
FAKE_LLAMA = """#!{python}
import argparse, json, pathlib
from http.server import BaseHTTPRequestHandler, HTTPServer
p = argparse.ArgumentParser()
for name in ("-m", "--slot-save-path", "-np", "-c", "-t", "--host", "--port"):
    p.add_argument(name)
args = p.parse_args()
assert pathlib.Path(args.m).name == "model.gguf", args
slot, folder = [], pathlib.Path(args.slot_save_path)
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self): self.answer({{"status": "ok"}})
    def do_POST(self):
        global slot
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({{"tokens": [ord(c) for c in asked["content"]]}})
        elif self.path == "/slots/0?action=save":
            (folder / asked["filename"]).write_text(json.dumps(slot))
            self.answer({{}})
        elif self.path == "/slots/0?action=restore":
            slot = json.loads((folder / asked["filename"]).read_text())
            self.answer({{}})
        else:
            assert self.path == "/completion" and asked["n_predict"] == 1, asked
            prompt = asked["prompt"]
            same = next((i for i, (a, b) in enumerate(zip(slot, prompt)) if a != b), min(len(slot), len(prompt)))
            slot = prompt
            self.answer({{"timings": {{"prompt_n": len(prompt) - same}}}})
    def answer(self, found):
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
HTTPServer((args.host, int(args.port)), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path))
    return tmp_path


def options(folder: Path, part: str) -> BenchOptions:
    return BenchOptions(quick=True, dtype="fp32", model=str(folder), max_tokens=300, parts=(part,))


def test_a_prefix_is_whole_blocks() -> None:
    assert prefix_tokens(BenchOptions()) == 8_000 == 125 * 64
    assert prefix_tokens(BenchOptions(quick=True)) == 512
    assert prefix_tokens(BenchOptions(max_tokens=300)) == 256
    assert prefix_tokens(BenchOptions(max_tokens=3)) == 64


def test_every_key_has_a_part() -> None:
    assert set(targets_of("prefix")) == {"warm_overhead", "warm_speedup"} | RESTART | VALKEY | SALT


def test_in_memory(tiny_model_folder: Path) -> None:
    outcome = run(options(tiny_model_folder, "memory"))
    assert set(outcome.summary) == {"warm_overhead", "warm_speedup"}
    assert [row["way"] for row in outcome.rows] == ["cold", "warm", "resident", "inside a block"]
    assert outcome.configuration == {"dtype": "fp32", "prefix_tokens": 256, "suffix_tokens": 64}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "run", perform)


@pytest.mark.slow
def test_a_task_is_a_process(tiny_model_folder: Path, tmp_path: Path) -> None:
    found = Task("kept", 256, 0, "fp32", str(tiny_model_folder), str(tmp_path / "kv")).run()
    assert found.first_token_s > 0
    assert (found.cached_tokens, found.restored_tokens) == (0, {})
    assert found.kept_bytes > 0


@pytest.mark.usefixtures("here")
def test_after_an_orderly_end(tiny_model_folder: Path, cache: Path) -> None:
    outcome = run(options(tiny_model_folder, "restart"))
    assert set(outcome.summary) == RESTART
    assert outcome.summary["restart_reused_share"] == 1.0
    ways = {row["way"]: row for row in outcome.rows}
    assert ways["cold"]["reused_tokens"] == 0
    assert ways["restored"]["reused_tokens"] == 256
    assert {"read by hand, torch.load", "mapped by hand, torch.load"} < set(ways)
    assert list(cache.glob("bench-*")) == []


@pytest.mark.usefixtures("here")
@pytest.mark.skipif(server_program() is None, reason="no valkey-server or redis-server is installed")
def test_from_a_server(tiny_model_folder: Path) -> None:
    outcome = run(options(tiny_model_folder, "valkey"))
    assert set(outcome.summary) == VALKEY
    assert [(row["way"], row["reused_tokens"]) for row in outcome.rows] == [("cold", 0), ("restored", 256)]


def test_a_server_that_is_not_there_is_named(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    outcome = run(options(tiny_model_folder, "valkey"))
    assert outcome.summary == {}
    (row,) = outcome.rows
    assert str(row["way"]).startswith("no valkey-server or redis-server is on the PATH")


def test_another_salts_text_is_nobodys(tiny_model_folder: Path) -> None:
    outcome = run(options(tiny_model_folder, "salt"))
    assert set(outcome.summary) == SALT
    assert (outcome.summary["salt_foreign_tokens"], outcome.summary["salt_own_share"]) == (0, 1)
    reused = {row["way"]: row["reused_tokens"] for row in outcome.rows}
    assert reused == {"another salt's text": 0, "nobody's text": 0, "its own text": 192}


# --- llama.cpp


def test_llama_cpp_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(xllamacpp_server, "PACKAGE", "no_such_package")
    (row,) = llama_slots.rows("part", Task("kept", 256, 0, "fp32"), BenchOptions(quick=True))
    missing = "no llama-server is on the PATH, and xllamacpp is not installed"
    assert row["way"] == f"llama.cpp, slot saved and restored: {missing}"


def test_a_llama_cpp_that_fails_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(llama_slots, "_program", lambda: [str(program)])
    asked = BenchOptions(quick=True, model="some/model.gguf")
    (row,) = llama_slots.rows("part", Task("kept", 256, 0, "fp32"), asked)
    assert str(row["way"]).startswith("llama.cpp, slot saved and restored: ")
    assert "3" in str(row["way"])


def test_the_package_serves_as_the_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package is told, by a stand-in: its own server is llama.cpp's."""
    told: list[Any] = []
    package = SimpleNamespace(
        CommonParams=lambda: SimpleNamespace(
            model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
        ),
        Server=told.append,
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    monkeypatch.setattr("signal.pause", lambda: None)
    words = ["-m", "x.gguf", "--slot-save-path", "/slots/", "-np", "1", "-c", "300", "-t", "2"]
    xllamacpp_server.serve([*words, "--host", "127.0.0.1", "--port", "9"])
    (params,) = told
    assert (params.model.path, params.slot_save_path, params.n_parallel, params.n_ctx) == ("x.gguf", "/slots/", 1, 300)
    assert (params.cpuparams.n_threads, params.cpuparams_batch.n_threads) == (2, 2)
    assert (params.hostnames, params.port) == (["127.0.0.1"], 9)


def test_llama_cpp_restores_a_slot_in_a_new_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(FAKE_LLAMA.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent))
    asked = BenchOptions(quick=True, model="some/model.gguf")
    cold, restored = llama_slots.rows("part", Task("kept", 256, 0, "fp32"), asked)
    assert cold["way"] == "llama.cpp, cold"
    assert (restored["way"], restored["processes"]) == ("llama.cpp, slot saved and restored", 1)
    assert restored["reused_tokens"] == 256
    folder = BenchOptions(quick=True, model="some/folder")
    (row,) = llama_slots.rows("part", Task("kept", 256, 0, "fp32"), folder)
    assert row["way"] == "llama.cpp, slot saved and restored: it reads GGUF only, not folder"
