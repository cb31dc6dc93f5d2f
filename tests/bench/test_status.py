"""The status file: what counts, what does not, and the colours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.bench.status import read_result, read_status, update_status, updated, write_status
from ktransformer2.bench.targets import TARGETS
from ktransformer2.errors import ConfigError


def result(full: bool = True, **summary: float) -> dict[str, Any]:
    return {
        "bench": "memory",
        "full": full,
        "measured_at": "2025-01-02T03:04:05+00:00",
        "summary": summary,
        "configuration": {"commit": "abc", "processor": "cpu", "kernels": "portable", "scenario": {"dtype": "bf16"}},
    }


def test_a_missing_file_is_every_key_unknown(tmp_path: Path) -> None:
    status = read_status(tmp_path / "status.json")
    assert list(status) == [target.name for target in TARGETS]
    assert {entry["state"] for entry in status.values()} == {"unknown"}
    assert status["1/memory/waste_tokens"] == {
        "relation": "<=",
        "target": 0.026,
        "value": None,
        "state": "unknown",
        "measured": None,
        "command": "ktransformer bench memory --json benchmarks/results/memory.json",
    }
    assert status["1/decode/ttft_vs_hf_8k"]["target"] is None


def test_a_full_run_colours_its_keys_and_leaves_the_others(tmp_path: Path) -> None:
    status = updated(read_status(tmp_path / "no.json"), result(waste_tokens=0.02, saved_vs_static=0.5))
    assert (status["1/memory/waste_tokens"]["value"], status["1/memory/waste_tokens"]["state"]) == (0.02, "green")
    assert status["1/memory/saved_vs_static"]["state"] == "red"
    assert status["1/memory/waste_bytes"]["state"] == "unknown"
    assert status["1/memory/waste_tokens"]["measured"] == {
        "at": "2025-01-02T03:04:05+00:00",
        "commit": "abc",
        "processor": "cpu",
        "kernels": "portable",
        "dtype": "bf16",
    }


def test_a_quick_run_does_not_count(tmp_path: Path) -> None:
    path, status_path = tmp_path / "memory.json", tmp_path / "status.json"
    path.write_text(json.dumps(result(full=False, waste_tokens=0.02)))
    status, ignored = update_status([path], status_path)
    assert ignored == [path]
    assert status["1/memory/waste_tokens"]["value"] is None
    assert read_status(status_path) == status


def test_a_target_that_moved_is_judged_anew(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = updated(read_status(path), result(waste_tokens=0.02))
    status["1/memory/waste_tokens"] |= {"target": 0.001, "state": "red"}  # as an older version would have written
    status["1/memory/a_key_of_old"] = status["1/memory/waste_tokens"]
    write_status(status, path)
    again = read_status(path)
    assert again["1/memory/waste_tokens"]["state"] == "green"
    assert "1/memory/a_key_of_old" not in again


@pytest.mark.parametrize("text", ["", "[", "{}", '{"bench": "memory"}'])
def test_what_is_not_a_result_is_a_typed_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a bench result"):
        read_result(path)


def test_the_status_in_the_repository_names_every_key() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "status.json"
    held = json.loads(path.read_text())
    assert list(held) == [target.name for target in TARGETS]
    assert held == read_status(path)
