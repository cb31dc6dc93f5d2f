"""The door to the scenarios: run one, write its JSON, print its tables, judge its targets. Measures nothing itself."""

from __future__ import annotations

import dataclasses
import importlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ktransformer2.bench import report, status
from ktransformer2.bench.outcome import SCENARIOS, BenchOptions, Outcome, say
from ktransformer2.bench.targets import broken, targets_of
from ktransformer2.errors import ConfigError

EXIT_BROKEN_TARGET = 5


def _scenario(name: str, options: BenchOptions) -> Outcome:
    if name not in SCENARIOS:
        raise ConfigError(f"there is no bench {name!r}; there are: {', '.join((*SCENARIOS, 'status'))}")
    scenario = importlib.import_module(f"ktransformer2.bench.{name}")
    parts: tuple[str, ...] = getattr(scenario, "PARTS", ())
    for part in options.parts:
        if part not in parts:
            raise ConfigError(f"bench {name} has no part {part!r}; it has: {', '.join(parts) or 'one only'}")
    if options.trace is not None and name != "policy":
        raise ConfigError(f"bench {name} replays no trace of yours; leave --trace out")
    if options.url is not None and not getattr(scenario, "TAKES_URL", False):
        raise ConfigError(f"bench {name} asks no server; leave --url out")
    if options.num_touches is not None and "agentic" not in parts:
        raise ConfigError(f"bench {name} replays no sessions of agents; leave --touches out")
    if options.resume is not None and not getattr(scenario, "RESUMABLE", False):
        raise ConfigError(f"bench {name} cannot go on where it stopped; leave --resume out")
    outcome: Outcome = scenario.run(options)
    unknown = set(outcome.summary) - set(targets_of(name))
    assert not unknown, f"summary keys without a target: {sorted(unknown)}"
    return outcome


def result_of(name: str, options: BenchOptions) -> dict[str, Any]:
    """Run a scenario; the result as it is written to JSON."""
    from ktransformer2.bench import environment

    began = datetime.now(UTC)
    outcome = _scenario(name, options)
    return {
        "bench": name,
        "full": options.is_full,
        "measured_at": began.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - began).total_seconds(), 1),
        "summary": outcome.summary,
        "rows": outcome.rows,
        "configuration": {
            **environment.describe(),
            "options": dataclasses.asdict(options),
            "scenario": outcome.configuration,
        },
    }


def _draw(name: str, rows: list[dict[str, Any]], path: Path) -> None:
    """The picture of a scenario that has one, beside its JSON."""
    draw = getattr(importlib.import_module(f"ktransformer2.bench.{name}"), "draw", None)
    if draw is not None and draw(rows, path):
        say(f"Plot: {path}")


def main(
    name: str,
    quick: bool = False,
    json_path: Path | None = None,
    check: bool = False,
    options: BenchOptions | None = None,
) -> int:
    """Run the scenario `name` (or print the `status`). Returns 5 where `check` is set and a target is broken, else 0.

    Side effects: writes `json_path`, and a plot beside it where the scenario has one; prints to stdout, progress to
    stderr. `status` puts `json_path`, a result, into the status file first. Raises ConfigError for an unknown name or
    missing data.
    """
    if name == "status":
        return show_status([json_path] if json_path else [], check)
    chosen = dataclasses.replace(options or BenchOptions(), quick=quick or (options is not None and options.quick))
    result = result_of(name, chosen)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1) + "\n")
        _draw(name, result["rows"], json_path.with_suffix(".png"))
    print(report.tables_by_part(result["rows"]))
    print()
    print(report.summary_table(name, result["summary"]))
    if not result["full"]:
        print("\nA quick or bounded run: these figures find faults; they do not count and are not to be quoted.")
    return EXIT_BROKEN_TARGET if check and broken(name, result["summary"]) else 0


def show_status(results: list[Path], check: bool = False, path: Path = status.STATUS_PATH) -> int:
    """Print every must-show key, after putting `results` in. Returns 5 where `check` is set and a key is red."""
    if results:
        entries, ignored = status.update_status(results, path)
        for result in ignored:
            print(f"{result} is a quick or bounded run and does not count")
    else:
        entries = status.read_status(path)
    print(report.status_table(entries))
    return EXIT_BROKEN_TARGET if check and any(entry["state"] == "red" for entry in entries.values()) else 0
