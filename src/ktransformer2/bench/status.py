"""The status of every must-show key: its target, its last value, whether that holds. Kept in one JSON file in the repo.

Only full runs count: a result of `--quick` or of a bounded run changes nothing here.
Invariant: the file holds exactly the keys of `targets.TARGETS`; a key without a value is `unknown`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktransformer2.bench.targets import REPORTED, TARGETS, Target
from ktransformer2.errors import ConfigError

STATUS_PATH = Path("benchmarks/results/status.json")
Entry = dict[str, Any]


def command_of(bench: str) -> str:
    return f"ktransformer bench {bench} --json benchmarks/results/{bench}.json"


def _state(target: Target, value: float | None) -> str:
    if value is None:
        return "unknown"
    return "green" if target.holds(value) else "red"


def _entry(target: Target, old: Mapping[str, Any]) -> Entry:
    value = old.get("value")
    return {
        "relation": target.relation,
        "target": None if target.relation == REPORTED else target.bound,
        "value": value,
        "state": _state(target, value),
        "measured": old.get("measured"),
        "command": command_of(target.bench),
    }


def read_status(path: Path = STATUS_PATH) -> dict[str, Entry]:
    """Every key with its target of today and the value that the file holds; a missing file is an empty one."""
    old = json.loads(path.read_text()) if path.exists() else {}
    return {target.name: _entry(target, old.get(target.name, {})) for target in TARGETS}


def read_result(path: Path) -> dict[str, Any]:
    """A result that `bench` wrote. Raises ConfigError where the file is not one."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a bench result: {error}; write one with --json {path}") from error
    missing = {"bench", "full", "measured_at", "summary", "configuration"} - set(result)
    if missing:
        raise ConfigError(f"{path} is not a bench result: {', '.join(sorted(missing))} is missing")
    return dict(result)


def updated(status: Mapping[str, Entry], result: Mapping[str, Any]) -> dict[str, Entry]:
    """The status with a result's figures put in. A result that does not count leaves it as it was."""
    if not result["full"]:
        return dict(status)
    configuration = result["configuration"]
    measured = {
        "at": result["measured_at"],
        "commit": configuration.get("commit", ""),
        "processor": configuration.get("processor", ""),
        "kernels": configuration.get("kernels", ""),
        "dtype": configuration.get("scenario", {}).get("dtype", ""),
    }
    fresh = dict(status)
    for target in TARGETS:
        if target.bench == result["bench"] and target.key in result["summary"]:
            old = {"value": result["summary"][target.key], "measured": measured}
            fresh[target.name] = _entry(target, old)
    return fresh


def write_status(status: Mapping[str, Entry], path: Path = STATUS_PATH) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(status, indent=1) + "\n")


def update_status(results: Sequence[Path], path: Path = STATUS_PATH) -> tuple[dict[str, Entry], list[Path]]:
    """Put results into the status file; returns the status and the results that did not count."""
    status, ignored = read_status(path), []
    for result_path in results:
        result = read_result(result_path)
        if not result["full"]:
            ignored.append(result_path)
        status = updated(status, result)
    write_status(status, path)
    return status, ignored
