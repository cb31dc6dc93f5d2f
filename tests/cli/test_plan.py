"""`plan`: the table and the JSON as people meet them, exit code 4 with ways out, and nothing loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktransformer2.engine import plan
from ktransformer2.engine.memory_budget import Memory
from tests.cli.invoking import assert_as_before, failed, invoke


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 GB and a process of 400 MB, whatever runs the tests."""
    monkeypatch.setattr(plan, "idle_process_bytes", lambda: 400 * 10**6)
    monkeypatch.setattr(Memory, "measure", classmethod(lambda cls: cls(8 * 10**9)))


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny model under a name that a snapshot can hold."""
    (tmp_path / "tiny").symlink_to(tiny_model_folder)
    monkeypatch.chdir(tmp_path)
    return "tiny"


def test_the_table(folder: str) -> None:
    result = invoke("plan", folder, "--ctx", "32k", "--sequences", "4", "--total", "1GB", "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert_as_before("plan", result.stdout)


def test_json_has_the_fields_of_the_table(folder: str) -> None:
    arguments = ("plan", folder, "--ctx", "32k", "--sequences", "4", "--total", "1GB", "--dtype", "float32")
    result = invoke(*arguments, "--json")
    assert_as_before("plan-json", result.stdout)
    found = json.loads(result.stdout)
    assert found["fits"] is True
    assert found["peak_bytes"] == next(f["total_bytes"] for f in found["forms"] if f["kv"] == found["chosen"])


def test_a_file_of_another_type_is_said(folder: str) -> None:
    result = invoke("plan", folder, "--ctx", "16", "--memory", "64MB", "--dtype", "bfloat16")
    assert_as_before("plan-while-loading", result.stdout)


def test_what_does_not_fit_exits_with_4_and_says_what_would(folder: str) -> None:
    result = invoke("plan", folder, "--sequences", "40", "--total", "500MB", "--kv", "full", "--dtype", "float32")
    assert result.exit_code == 4
    assert_as_before("plan-does-not-fit", result.stdout + result.stderr)


def test_a_way_out_that_is_named_is_one(folder: str) -> None:
    common = ("plan", folder, "--total", "500MB", "--kv", "full", "--dtype", "float32", "--json")
    tight = json.loads(invoke(*common, "--sequences", "40").stdout)
    longest = next(form["longest_tokens"] for form in tight["forms"] if form["kv"] == "full")
    assert invoke(*common, "--sequences", "40", "--ctx", str(longest)).exit_code == 0
    assert invoke(*common, "--sequences", "40", "--ctx", str(longest + 64)).exit_code == 4


def test_settings_count(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_MODEL", folder)
    monkeypatch.setenv("KTRANSFORMER_KV", "full")
    monkeypatch.setenv("KTRANSFORMER_MEMORY", "3MB")
    found = json.loads(invoke("plan", "--ctx", "64", "--json").stdout)
    assert (found["model"], found["chosen"]) == (folder, "full")
    assert {form["limit_bytes"] for form in found["forms"]} == {3_000_000}


def test_wrong_input_is_one_line() -> None:
    assert "no model is named" in failed(invoke("plan"), 2)
    assert "token count 'long' is not understood" in failed(invoke("plan", "x", "--ctx", "long"), 2)
    assert "size 'much' is not understood" in failed(invoke("plan", "x", "--total", "much"), 2)
    assert failed(invoke("plan", "x", "--ctx", "0"), 2) == "error: --ctx: '0' is not allowed; allowed: 1 or more"
    assert failed(invoke("plan", "x", "--total", "0"), 2) == "error: --total: '0' is not allowed; allowed: 1 or more"
    assert "no file or folder './nowhere'" in failed(invoke("plan", "./nowhere"), 1)
