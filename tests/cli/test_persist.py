"""What a command keeps for the next one: by default, and said so; nothing where it is told not to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ktransformer2.cli.keeping import Keeping
from ktransformer2.cli.last_chat import last_chat_path
from ktransformer2.demo.restart import LastQuestion
from ktransformer2.engine.llm import LLM
from ktransformer2.engine.sampling import SamplingParams
from tests.cli.invoking import CLI, invoke

TEXT = "The parties agree as follows. " * 20


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where blocks lie; the setting `persist` is not touched. What was said lies in `data` beside it."""
    monkeypatch.delenv("KTRANSFORMER_PERSIST")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path))
    return tmp_path / "kv"


def command(folder: Path, *more: str) -> list[str]:
    return ["run", str(folder), "-p", TEXT, "--memory", "64MB", "--max-new-tokens", "2", "--dtype", "float32", *more]


def test_a_second_run_restores_what_the_first_one_read(tiny_model_folder: Path, directory: Path) -> None:
    first, second = (invoke(*command(tiny_model_folder)) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout
    assert "(0 cached)" in first.stderr
    assert "Kept for the next time: " in first.stderr
    assert str(directory) in first.stderr.replace("\n", "")
    assert "(restored " in second.stderr
    assert ", reused " in second.stderr
    assert oct(directory.stat().st_mode & 0o777) == "0o700"


def test_no_persist_writes_and_reads_nothing(tiny_model_folder: Path, directory: Path) -> None:
    result = invoke(*command(tiny_model_folder, "--no-persist"))
    assert result.exit_code == 0, result.stderr
    assert "Kept" not in result.stderr
    assert not directory.exists()
    invoke(*command(tiny_model_folder))
    assert "(0 cached)" in invoke(*command(tiny_model_folder, "--no-persist")).stderr


def test_the_figures_say_what_was_restored(tiny_model_folder: Path) -> None:
    invoke(*command(tiny_model_folder))
    found = json.loads(invoke(*command(tiny_model_folder, "--json")).stdout)
    assert found["restored_tokens"]["disk"] == found["stats"]["cache"]["restored_tokens"]["disk"] > 0


# --- chat --continue


def chat(*arguments: str | Path, lines: list[str]) -> Any:
    options = ["--memory", "64MB", "--max-new-tokens", "4", "--dtype", "float32"]
    return invoke("chat", *arguments, *options, stdin="\n".join(lines) + "\n")


def test_a_conversation_goes_on_in_the_next_process(tiny_model_folder: Path, tmp_path: Path) -> None:
    first = chat(tiny_model_folder, "--system", "Be kind", lines=["x" * 200, "And?"])
    assert first.exit_code == 0, first.stderr
    kept = json.loads(last_chat_path().read_text(encoding="utf-8"))
    assert kept["model"] == str(tiny_model_folder)
    assert [message["role"] for message in kept["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert oct(last_chat_path().stat().st_mode & 0o777) == "0o600"
    assert last_chat_path().is_relative_to(tmp_path / "data")
    second = chat("--continue", lines=["Go on"])
    assert second.exit_code == 0, second.stderr
    assert "Going on after 5 messages" in second.stderr
    restored, reused = re.findall(r"\(restored (\d+), reused (\d+)\)", second.stderr)[0]
    assert int(reused) >= int(restored) >= 192
    now = json.loads(last_chat_path().read_text(encoding="utf-8"))["messages"]
    assert now[:5] == kept["messages"]
    assert now[5] == {"role": "user", "content": "Go on"}
    third = chat("-c", "--system", "Be brief", lines=["More"])
    assert "Going on after 7 messages" in third.stderr
    assert json.loads(last_chat_path().read_text(encoding="utf-8"))["messages"][0]["content"] == "Be brief"


def test_clear_deletes_what_was_said(tiny_model_folder: Path) -> None:
    chat(tiny_model_folder, lines=["Hello"])
    chat(tiny_model_folder, lines=["/clear", "/bye"])
    assert last_chat_path().exists(), "that was another conversation"
    chat("-c", lines=["/clear", "/bye"])
    assert not last_chat_path().exists()
    chat(tiny_model_folder, lines=["Hello", "/clear"])
    assert not last_chat_path().exists()
    chat(tiny_model_folder, lines=["Hello"])
    assert "The last conversation is gone too." in invoke("cache", "clear").stdout
    assert not last_chat_path().exists()
    result = chat("-c", lines=["Hello"])
    assert result.exit_code == 2
    assert "no conversation was kept to go on with; `ktransformer chat` begins one" in result.stderr


def test_no_persist_keeps_no_conversation_and_reads_none(tiny_model_folder: Path) -> None:
    chat(tiny_model_folder, "--no-persist", lines=["Hello"])
    assert not last_chat_path().exists()
    chat(tiny_model_folder, lines=["Hello"])
    before = last_chat_path().read_bytes()
    chat(tiny_model_folder, "--no-persist", lines=["Secret", "/clear"])
    assert last_chat_path().read_bytes() == before
    result = chat("-c", "--no-persist", lines=["Hello"])
    assert result.exit_code == 2
    assert "--continue reads what was kept on disk, and --no-persist" in result.stderr


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("nothing", "it is no JSON"),
        ("[]", "it names no model"),
        ('{"model": "x"}', "holds no list of messages"),
        ('{"model": "x", "messages": [{"role": "boss", "content": "y"}]}', "message 1 has a role"),
    ],
)
def test_a_broken_conversation_is_named(content: str, why: str) -> None:
    last_chat_path().parent.mkdir(parents=True)
    last_chat_path().write_text(content, encoding="utf-8")
    result = chat("-c", lines=["Hello"])
    assert result.exit_code == 2
    assert f"{last_chat_path()} cannot be gone on with: {why}" in result.stderr


def test_a_conversation_that_cannot_be_kept_is_told_of_once(tiny_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file, where a directory should be", encoding="utf-8")
    result = chat(tiny_model_folder, lines=["Hello", "More"])
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("This conversation cannot be kept for --continue") == 1


def test_where_blocks_go_is_said_at_the_first_write(tiny_model_folder: Path, directory: Path) -> None:
    """The second question finds blocks of the first one, and a second use is what has them written."""
    llm, console = LLM(tiny_model_folder, memory="64MB", dtype="float32", persist=directory), Console(record=True)
    keeping = Keeping(llm, "x", console)
    llm.generate(TEXT, SamplingParams(2))
    keeping.look()
    llm.generate(TEXT, SamplingParams(2))
    assert console.export_text(clear=False) == ""
    assert llm.cache._lower is not None
    assert llm.cache._lower._combiner.flush(10.0)
    keeping.look()
    keeping.look()
    llm.close()
    keeping.end()
    said, at_end = console.export_text().splitlines()
    place = rf".* of at most 8 GB in {directory}"
    assert re.fullmatch(rf"What is read is kept on disk: {place}; --no-persist keeps nothing, .*", said)
    assert re.fullmatch(rf"Kept for the next time: {place}\.", at_end)


def test_the_demo_asks_once_more_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastQuestion, "ask", LastQuestion.answer)  # in this one, which saves its start
    arguments = ("--source", "random", "--context", "600", "--max-new-tokens", "8", "--memory", "64MB")
    result = invoke("demo", *arguments, "--json", "--png", tmp_path / "plot.png")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["after_restart"]
    assert found["restored_tokens"]["disk"] == found["cached_tokens"] > 0.5 * found["prompt_tokens"]
    assert "A new process loads the model" in result.stderr
    nothing = invoke("demo", *arguments, "--no-persist", "--json", "--png", tmp_path / "plot.png")
    assert json.loads(nothing.stdout)["after_restart"] is None


@pytest.mark.slow
def test_sigterm_is_an_orderly_end(tiny_model_folder: Path, directory: Path) -> None:
    arguments = [*CLI, *command(tiny_model_folder)]
    arguments[arguments.index("2")] = "100k"
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it answers
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 30
    assert any(directory.iterdir())
    assert "(restored " in invoke(*command(tiny_model_folder)).stderr


def test_a_cache_directory_on_a_network_is_not_used_and_stops_nobody(
    tiny_model_folder: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktransformer2.tiers.disk_directory.network_file_system", lambda path: "nfs4")
    result = invoke(*command(tiny_model_folder))
    assert result.exit_code == 0, result.stderr
    assert "lies on a network file system (nfs4). Name a local directory" in result.stderr
    assert not directory.exists()
    asked = invoke(*command(tiny_model_folder, "--persist"))
    assert asked.exit_code == 2
    assert "network file system (nfs4)" in asked.stderr
