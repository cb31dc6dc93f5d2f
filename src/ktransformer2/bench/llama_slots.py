"""The rival in a program of its own: llama.cpp's server saves a slot to a file, and a new server restores it.

Only where a `llama-server` is on the PATH, or the package xllamacpp is installed, which has the same server; nothing is
downloaded or built. It is asked over HTTP on this machine, with its own defaults and the threads that torch has here.
What goes wrong with it is named in its row, and costs the other rows nothing. Knows nothing of ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ktransformer2.bench import xllamacpp_server
from ktransformer2.bench.cold_files import drop_pages, scratch
from ktransformer2.bench.corpus import text_of
from ktransformer2.bench.outcome import BenchOptions, say
from ktransformer2.bench.prefix_process import SUFFIX_TOKENS, Task
from ktransformer2.bench.rounds import spread
from ktransformer2.bench.valkey_server import free_port, wait_for
from ktransformer2.models.demo import smollm2_from_wheel
from ktransformer2.models.store import cache_directory

_ANSWER_S, _LOADING_S = 900.0, 120.0
_FILE = "prefix.bin"
_NAME = "llama.cpp, slot saved and restored"
Row = dict[str, object]


def rows(part: str, task: Task, options: BenchOptions) -> list[Row]:
    """Seconds to the first token: all of it read, and in a new server behind a restored slot. Or why there are none."""
    try:
        return _rows(part, task, options)
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # what a server of others and its answers may do
        return [{"part": part, "way": f"{_NAME}: {error}"}]


def _rows(part: str, task: Task, options: BenchOptions) -> list[Row]:
    program = _program()
    if not program:
        return [{"part": part, "way": f"{_NAME}: no llama-server is on the PATH, and xllamacpp is not installed"}]
    if options.model is not None and not options.model.endswith(".gguf"):
        return [{"part": part, "way": f"{_NAME}: it reads GGUF only, not {Path(options.model).name}"}]
    model = Path(options.model) if options.model is not None else smollm2_from_wheel(cache_directory())
    with scratch("slots") as folder:
        command = [*program, "-m", str(model), "--slot-save-path", f"{folder}/", "-np", "1"]
        command += ["-c", str(task.prefix_tokens + 4 * SUFFIX_TOKENS), "-t", str(torch.get_num_threads())]
        cold, restored, reused = _measured(command, folder, task.prefix_tokens, 1 if options.quick else 5)
        kept = (folder / _FILE).stat().st_size
    return [
        {"part": part, "way": "llama.cpp, cold", "first_token_s": cold, "processes": 1},
        {"part": part, "way": _NAME, **spread(restored).as_row("first_token_s"), "processes": len(restored)}
        | {"kept_mb": kept / 1e6, "reused_tokens": reused},
    ]


def _program() -> list[str]:
    """How its server is started; empty: it is not installed."""
    found = shutil.which("llama-server")
    if found is not None:
        return [found]
    return [sys.executable, "-m", xllamacpp_server.__name__] if xllamacpp_server.is_installed() else []


def _measured(command: Sequence[str], folder: Path, prefix_tokens: int, rounds: int) -> tuple[float, list[float], int]:
    """(seconds cold, seconds of every restored reading, fewest tokens that were reused)."""
    restored, reused = [], prefix_tokens
    with _serving(command) as url:
        say("llama-server reads the prefix")
        tokens = _ask(url, "/tokenize", {"content": text_of("english")})["tokens"]
        prefix = tokens[:prefix_tokens]
        cold, _ = _first_token(url, prefix + _suffix(tokens, prefix_tokens, 0))
        _ask(url, "/slots/0?action=save", {"filename": _FILE})
    for number in range(1, 1 + rounds):
        say(f"a new llama-server restores the slot, {number} of {rounds}")
        drop_pages(folder)
        with _serving(command) as url:
            _first_token(url, tokens[-SUFFIX_TOKENS:])  # weights are in memory, threads are awake
            began = time.perf_counter()
            _ask(url, "/slots/0?action=restore", {"filename": _FILE})
            prompt = prefix + _suffix(tokens, prefix_tokens, number)
            _, num_read = _first_token(url, prompt)
            restored.append(time.perf_counter() - began)
            reused = min(reused, len(prompt) - num_read)
    return cold, restored, reused


def _suffix(tokens: Sequence[int], start: int, number: int) -> list[int]:
    return list(tokens[start + number * SUFFIX_TOKENS : start + (number + 1) * SUFFIX_TOKENS])


def _first_token(url: str, prompt: Sequence[int]) -> tuple[float, int]:
    """(seconds to the first token, tokens of the prompt that had to be read)."""
    began = time.perf_counter()
    asked = {"prompt": list(prompt), "n_predict": 1, "cache_prompt": True, "id_slot": 0, "temperature": 0}
    answer = _ask(url, "/completion", asked)
    return time.perf_counter() - began, int(answer["timings"]["prompt_n"])


@contextmanager
def _serving(command: Sequence[str]) -> Iterator[str]:
    """The address of a server that has loaded its model. Raises: RuntimeError where it does not come up."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        with subprocess.Popen([*command, *address], stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                wait_for(process, port, _LOADING_S)
                _wait_until_loaded(url)
                yield url
            finally:
                process.terminate()


def _wait_until_loaded(url: str) -> None:
    until = time.monotonic() + _LOADING_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except urllib.error.HTTPError as error:  # 503 while it loads
            error.close()
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"llama-server at {url} has not loaded its model after {_LOADING_S:.0f} s")


def _ask(url: str, path: str, content: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(content).encode()
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
