"""`config`: what is printed of settings, and what is said where one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktransformer2.cli import guard
from ktransformer2.settings import knobs
from tests.cli.invoking import assert_as_before, failed, invoke


@pytest.fixture(autouse=True)
def nothing_said(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even `persist`."""
    del no_settings
    monkeypatch.delenv("KTRANSFORMER_PERSIST")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose settings are in force."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ktransformer.toml"


def test_show() -> None:
    assert_as_before("config-show", invoke("config", "show").stdout)


def test_show_with_origins(project: Path, no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_settings.write_text('memory = "2GB"\nkv = "full"\n', encoding="utf-8")
    project.write_text('# ours\nmemory = "4GB"\n', encoding="utf-8")
    monkeypatch.setenv("KTRANSFORMER_SHRINK_THRESHOLD_RATIO", "0.25")
    result = invoke("config", "show", "--origin")
    assert result.exit_code == 0, result.stderr
    widths = {str(project): "PROJECT", str(no_settings): "USER"}
    shown = result.stdout
    for path, word in widths.items():
        shown = shown.replace(path, word.ljust(len(path)))
    cells = [" ".join(line.split()) for line in shown.splitlines()]
    assert_as_before("config-show-origin", "\n".join(cells) + "\n")


def test_json_has_every_knob_with_the_fields_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_MEMORY", "8GB")
    found = {row["name"]: row for row in json.loads(invoke("config", "show", "--json").stdout)["knobs"]}
    assert list(found) == list(knobs())
    assert found["memory"] == {
        "name": "memory",
        "value": 8_000_000_000,
        "origin": "KTRANSFORMER_MEMORY",
        "unit": "bytes",
        "default": "auto",
        "also_known_as": "",
        "chosen_by": "a limit, for safety",
        "effect": found["memory"]["effect"],
        "cost": "less memory: fewer cached prefixes, more waiting",
    }
    assert found["defrag_interval_requests"]["also_known_as"] == "DEFRAG_INTERVAL"


def test_path(project: Path, no_settings: Path) -> None:
    project.touch()
    assert invoke("config", "path").stdout == f"{project}  (project)\n{no_settings}  (user, not there)\n"
    files = json.loads(invoke("config", "path", "--json").stdout)["files"]
    assert [(row["whose"], row["found"]) for row in files] == [("project", True), ("user", False)]


def test_check(project: Path, tmp_path: Path) -> None:
    assert "No file is read here" in invoke("config", "check").stdout
    project.write_text('memory = "4GB"\nkv = "int8"\n', encoding="utf-8")
    assert invoke("config", "check").stdout == f"{project}: 2 settings, all right\n"
    files = json.loads(invoke("config", "check", "--json").stdout)["files"]
    assert files == [{"file": str(project), "settings": ["kv", "memory"]}]
    other = tmp_path / "other.toml"
    other.write_text("grow_factor = 2\n", encoding="utf-8")
    message = failed(invoke("config", "check", other), guard.EXIT_USAGE)
    assert message == f"error: {other}:1: unknown setting 'grow_factor'; did you mean 'growth_factor'?"


@pytest.mark.parametrize(
    "command",
    [("run", "/no/such/model", "-p", "x"), ("chat", "/no/such/model"), ("config", "show"), ("doctor", "--live")],
)
def test_a_wrong_setting_ends_every_command_before_anything_is_loaded(command: tuple[str, ...], project: Path) -> None:
    project.write_text('\nmemroy = "4GB"\n', encoding="utf-8")
    message = failed(invoke(*command), guard.EXIT_USAGE)
    assert message == f"error: {project}:2: unknown setting 'memroy'; did you mean 'memory'?"


def test_settings_reach_the_engine(tiny_model_folder: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write_text(f'model = "{tiny_model_folder}"\nmemory = "64MB"\nmax_new_tokens = 3\n', encoding="utf-8")
    found = json.loads(invoke("run", "-p", "Hello", "--json").stdout)
    assert (found["new_tokens"], found["stats"]["cache"]["limit_bytes"]) == (3, 64_000_000)
    assert found["model"] == str(tiny_model_folder)
    monkeypatch.setenv("KTRANSFORMER_MAX_NEW_TOKENS", "4")
    assert json.loads(invoke("run", "-p", "Hello", "--json").stdout)["new_tokens"] == 4
    assert json.loads(invoke("run", "-p", "Hello", "--json", "--max-new-tokens", "5").stdout)["new_tokens"] == 5


@pytest.mark.parametrize("command", ["run", "chat"])
def test_no_model_named_anywhere(command: str) -> None:
    message = failed(invoke(command, stdin="Hello"), guard.EXIT_USAGE)
    assert_as_before("error-no-model", message + "\n")
