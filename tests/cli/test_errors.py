"""What people read when something is wrong, to the letter: what, got, allowed, what to do; no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktransformer2.cli import guard
from tests.cli.invoking import assert_as_before, failed, invoke

_RUN = ("run", "MODEL", "-p", "x")


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("model-not-found", ("run", "/no/such/model", "-p", "x"), guard.EXIT_FAILED),
        ("memory", (*_RUN, "--max-new-tokens", "5k", "--memory", "1MB"), guard.EXIT_DOES_NOT_FIT),
        ("context", (*_RUN, "--max-new-tokens", "200k", "--memory", "64MB"), guard.EXIT_DOES_NOT_FIT),
        ("size", (*_RUN, "--memory", "lots"), guard.EXIT_USAGE),
        ("tokens", (*_RUN, "--max-new-tokens", "many"), guard.EXIT_USAGE),
        ("dtype", (*_RUN, "--dtype", "float16"), guard.EXIT_USAGE),
        ("top-p", (*_RUN, "--top-p", "0"), guard.EXIT_USAGE),
        ("kv", (*_RUN, "--kv", "int4"), guard.EXIT_USAGE),
        ("empty-prompt", ("run", "MODEL", "-p", ""), guard.EXIT_USAGE),
        ("no-such-model-to-remove", ("models", "rm", "nothing"), guard.EXIT_FAILED),
    ],
)
def test_error(
    name: str,
    arguments: tuple[str, ...],
    code: int,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path))
    words = [str(tiny_model_folder) if word == "MODEL" else word for word in arguments]
    message = failed(invoke(*words), code)
    assert_as_before(f"error-{name}", message.replace(str(tmp_path), "CACHE") + "\n")


def test_unknown_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ktransformer.toml").write_text("growth_facter = 2\n", encoding="utf-8")
    message = failed(invoke("config", "show"), guard.EXIT_USAGE)
    assert_as_before("error-unknown-setting", message.replace(str(tmp_path), "PROJECT") + "\n")


def test_a_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_BLOCK_TOKENS", "100")
    assert_as_before("error-variable", failed(invoke("config", "show"), guard.EXIT_USAGE) + "\n")


def test_a_model_that_is_not_served(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "other"
    folder.mkdir()
    for file in tiny_model_folder.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba"], "model_type": "mamba"}))
    message = failed(invoke("run", "other", "-p", "x"), guard.EXIT_FAILED)
    assert_as_before("error-model-not-served", message + "\n")


def test_a_plan_that_does_not_fit(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").symlink_to(tiny_model_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ktransformer2.engine.plan.idle_process_bytes", lambda: 400 * 10**6)
    result = invoke("plan", "tiny", "--sequences", "40", "--total", "500MB", "--kv", "full", "--dtype", "float32")
    assert result.exit_code == guard.EXIT_DOES_NOT_FIT
    assert_as_before("error-plan-does-not-fit", result.stderr)


def test_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    message = failed(invoke("run", "nobody/no-such-model", "-p", "x"), guard.EXIT_NOT_REACHABLE)
    known = message.partition("; downloaded before")[0]  # what the hub's library holds on this machine
    assert_as_before("error-not-reachable", known + "\n")
