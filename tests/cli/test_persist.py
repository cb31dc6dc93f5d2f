"""What a command keeps for the next one: by default, and said so; nothing where it is told not to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.invoking import CLI, invoke

TEXT = "The parties agree as follows. " * 20


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where blocks lie; the setting `persist` is not touched."""
    monkeypatch.delenv("KTRANSFORMER_PERSIST")
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
