"""`ktransformer serve`, from its start to Ctrl-C, and what it says when it cannot start."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ktransformer2.cli import serve
from tests.cli.invoking import CLI, failed, invoke


def served_models(url: str) -> list[str] | None:
    """None: the server is not ready yet."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            return [model["id"] for model in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        error.close()
        return None


def test_a_server_from_its_start_to_ctrl_c(tiny_model_folder: Path) -> None:
    command = [*CLI, "serve", str(tiny_model_folder), "--port", "0", "--memory", "64MB", "--log-json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r"API\s+(\S+)/v1 \(key: none", line)))
        while (models := served_models(url)) is None:
            pass
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert models == [tiny_model_folder.name]
    assert (process.returncode, out) == (0, "")


def test_a_model_that_is_not_there_ends_the_command() -> None:
    assert "no-such-model" in failed(invoke("serve", "/nowhere/no-such-model", "--port", "0"), 1)


def test_a_taken_port_and_a_key_file_for_all_to_read_are_told_before_the_model_loads(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna 0123456789abcdef\n")
    keys.chmod(0o644)
    assert "chmod 600" in failed(invoke("serve", "/nowhere/x", "--port", "0", "--key-file", keys), 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "--port 0 for a free one" in failed(invoke("serve", "/nowhere/x", "--port", str(port)), 2)


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    message = failed(invoke("serve", "/nowhere/x"), 2)
    assert message == 'error: serving needs uvicorn; pip install "ktransformer2[serve]" brings them'


def test_names_are_never_paths(tmp_path: Path) -> None:
    assert serve.served_names("owner/name") == ["owner/name", "name"]
    assert serve.served_names(str(tmp_path / "a.gguf")) == ["a"]
    assert serve.served_names("name") == ["name"]
    assert serve.served_names("/") == ["model"]
