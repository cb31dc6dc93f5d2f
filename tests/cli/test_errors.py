"""What people read when something is wrong, to the letter: what, got, allowed, what to do; no traceback."""

from __future__ import annotations

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


def test_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    message = failed(invoke("run", "nobody/no-such-model", "-p", "x"), guard.EXIT_NOT_REACHABLE)
    known = message.partition("; downloaded before")[0]  # what the hub's library holds on this machine
    assert_as_before("error-not-reachable", known + "\n")
