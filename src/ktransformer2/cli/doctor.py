"""`ktransformer doctor`: what is wrong with this machine, or with a running cache, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformer2.cli.guard import EXIT_FAILED, reported, write
from ktransformer2.cli.options import JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ktransformer2.cli.checkup import Check
    from ktransformer2.engine.snapshot import Snapshot
    from ktransformer2.engine.troubles import Finding


@reported
def doctor(
    live: Annotated[
        bool, typer.Option("--live", help="Look at a cache at work: a short workload with the settings in force.")
    ] = False,
    stats: Annotated[
        Path | None,
        typer.Option(help="With --live: counters of a real run, from run --json or /stats FILE.", exists=True),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Look for what is wrong, and say how to mend it.

    Exits with 1 where a problem is found. Asks the network nothing.
    """
    if live or stats is not None:
        ok = _live(stats, as_json=as_json)
    else:
        from ktransformer2.cli.checkup import checkup

        checks = checkup()
        ok = all(check.state != "PROBLEM" for check in checks)
        found = {"ok": ok, "checks": [dataclasses.asdict(check) for check in checks]}
        write(json.dumps(found, indent=1) + "\n" if as_json else shown_checks(checks))
    raise typer.Exit(0 if ok else EXIT_FAILED)


def shown_checks(checks: Sequence[Check]) -> str:
    """One line a check, its fix below it."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<7}  {check.name.ljust(width)}  {check.value}")
        if check.fix:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.fix}")
    problems = sum(check.state == "PROBLEM" for check in checks)
    lines.append(f"{problems} problem{'s' if problems != 1 else ''} found." if problems else "No problem found.")
    return "\n".join(lines) + "\n"


def _live(stats: Path | None, *, as_json: bool) -> bool:
    """Whether all is well."""
    from ktransformer2.engine.troubles import diagnose

    snapshot, source = _exercised() if stats is None else (_read(stats), str(stats))
    findings = diagnose(snapshot.cache, snapshot.engine)
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        found = {"ok": not findings, "source": source, "findings": listed, "stats": snapshot.as_json()}
        write(json.dumps(found, indent=1) + "\n")
    else:
        write(f"Counters of {source}.\n{shown_findings(findings, snapshot)}")
    return not findings


def _exercised() -> tuple[Snapshot, str]:
    from ktransformer2 import settings
    from ktransformer2.bench.exercise import MEMORY_BYTES, exercise
    from ktransformer2.config import CacheConfig, EngineConfig, format_bytes

    chosen = settings.resolve()
    cache = CacheConfig.load({**chosen.cache_values, "memory_bytes": MEMORY_BYTES})
    words = f"a built-in workload in {format_bytes(MEMORY_BYTES)}; --stats FILE reads those of a real run"
    return exercise(cache, EngineConfig.load(chosen.engine_values)), words


def _read(path: Path) -> Snapshot:
    from ktransformer2.cli.files import read_text
    from ktransformer2.engine.snapshot import Snapshot
    from ktransformer2.errors import ConfigError

    try:
        return Snapshot.from_json(json.loads(read_text(path)))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is no JSON ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def shown_findings(findings: Sequence[Finding], snapshot: Snapshot) -> str:
    """The figures in a line, then each trouble with its symptom, its counter and its knob."""
    from ktransformer2.engine.troubles import TROUBLES

    cache, engine = snapshot.cache, snapshot.engine
    lines = [
        f"{engine.num_added} requests, hit ratio {cache.hit_ratio:.2f}, {cache.growth_per_1k_tokens:.2f} growths per "
        f"1,000 tokens, {cache.shrink_events} shrinks, fragmentation {cache.fragmentation_ratio:.2f}, "
        f"{sum(cache.evictions.values())} blocks evicted, {engine.num_preemptions} preemptions"
    ]
    for finding in findings:
        lines += [
            f"TROUBLE  {finding.trouble}: {finding.symptom}",
            f"         {finding.counter} = {finding.value:.4g}, past {finding.limit:.4g}",
            f"         -> {finding.knob}: {finding.advice}",
        ]
    if not findings:
        lines.append(f"None of these: {', '.join(TROUBLES)}.")
    return "\n".join(lines) + "\n"
