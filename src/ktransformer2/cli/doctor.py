"""`ktransformer doctor`: what is wrong with this machine, or with a running cache, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformer2.cli.guard import EXIT_FAILED, reported, write
from ktransformer2.cli.options import JsonFlag, KeyFileOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ktransformer2.cache.stats import CacheStats
    from ktransformer2.cli.checkup import Check
    from ktransformer2.engine.outputs import EngineStats
    from ktransformer2.engine.snapshot import Snapshot
    from ktransformer2.engine.troubles import Finding


@reported
def doctor(
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Look at a cache at work: the one at --url, else a built-in exercise with the settings in force.",
        ),
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="With --live: where a running cache is served, such as http://127.0.0.1:8765.")
    ] = None,
    key_file: KeyFileOption = None,
    stats: Annotated[
        Path | None,
        typer.Option(help="With --live: counters of a real run, from run --json or /stats FILE.", exists=True),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Look for what is wrong, and say how to mend it.

    Exits with 1 where a problem is found. Asks the network nothing but what --url names.
    """
    from ktransformer2.errors import ConfigError

    if url is not None and stats is not None:
        raise ConfigError("give one of --url and --stats")
    if url is None and key_file is not None:
        raise ConfigError("--key-file goes with --url")
    if url is not None:
        ok = _served(url, key_file, as_json=as_json)
    elif live or stats is not None:
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


def _served(url: str, key_file: Path | None, *, as_json: bool) -> bool:
    """Whether all is well with a running cache. A server tells of its cache alone: what an engine counts is not judged.

    Raises: NoServerError, ConfigError.
    """
    from ktransformer2.cli import looking
    from ktransformer2.engine.outputs import EngineStats
    from ktransformer2.engine.troubles import diagnose
    from ktransformer2.monitor.client import Observation

    (look,) = looking.fetched(url, key_file, None)
    cache = Observation.from_json(look.answer).stats
    findings = diagnose(cache, EngineStats())
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        found = {"ok": not findings, "source": look.source, "findings": listed, "stats": {"cache": cache.as_json()}}
        write(json.dumps(found, indent=1) + "\n")
    else:
        write(f"Counters of the cache at {look.source}; of its engine none is served.\n")
        write(shown_findings(findings, cache, None))
    return not findings


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
        write(f"Counters of {source}.\n{shown_findings(findings, snapshot.cache, snapshot.engine)}")
    return not findings


def _exercised() -> tuple[Snapshot, str]:
    from ktransformer2 import settings
    from ktransformer2.bench.exercise import MEMORY_BYTES, exercise
    from ktransformer2.config import CacheConfig, EngineConfig, format_bytes

    chosen = settings.resolve()
    cache = CacheConfig.load({**chosen.cache_values, "memory_bytes": MEMORY_BYTES})
    words = f"a built-in exercise in {format_bytes(MEMORY_BYTES)}; --url and --stats read those of a real cache"
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


def shown_findings(findings: Sequence[Finding], cache: CacheStats, engine: EngineStats | None) -> str:
    """The figures in a line, then each trouble with its symptom, its counter and its knob."""
    from ktransformer2.engine.troubles import TROUBLES

    figures = [
        f"hit ratio {cache.hit_ratio:.2f}",
        f"{cache.growth_per_1k_tokens:.2f} growths per 1,000 tokens",
        f"{cache.shrink_events} shrinks",
        f"fragmentation {cache.fragmentation_ratio:.2f}",
        f"{sum(cache.evictions.values())} blocks evicted",
    ]
    looked_for = list(TROUBLES)
    if engine is None:
        looked_for.remove("preemptions")
    else:
        figures = [f"{engine.num_added} requests", *figures, f"{engine.num_preemptions} preemptions"]
    lines = [", ".join(figures)]
    for finding in findings:
        lines += [
            f"TROUBLE  {finding.trouble}: {finding.symptom}",
            f"         {finding.counter} = {finding.value:.4g}, past {finding.limit:.4g}",
            f"         -> {finding.knob}: {finding.advice}",
        ]
    if not findings:
        lines.append(f"None of these: {', '.join(looked_for)}.")
    return "\n".join(lines) + "\n"
