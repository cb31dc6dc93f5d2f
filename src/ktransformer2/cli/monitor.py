"""`ktransformer-monitor`: how a running cache does, read over HTTP, or from a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktransformer2.cli.guard import EXIT_THRESHOLD, reported, write
from ktransformer2.cli.options import JsonFlag, KeyFileOption, UrlOption
from ktransformer2.cli.usage import Command

app = typer.Typer(
    name="ktransformer-monitor", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.command(cls=Command)
@reported
def monitor(
    metric: Annotated[
        list[str] | None, typer.Option(help="What to show, once or several times; else cache_stats.")
    ] = None,
    list_metrics: Annotated[bool, typer.Option("--list", help="List the metrics, and leave.")] = False,
    url: UrlOption = None,
    key_file: KeyFileOption = None,
    watch: Annotated[float | None, typer.Option(help="Look again every so many seconds.", min=0.1)] = None,
    as_json: JsonFlag = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Figures and counters, a line of CSV a look.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 5 as soon as a figure is red.")] = False,
    record: Annotated[Path | None, typer.Option(help="Add every look to this file, a line of JSON each.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Show the looks of such a file.", exists=True, dir_okay=False)
    ] = None,
    mock: Annotated[bool, typer.Option("--mock", help="Made-up figures: what it looks like.")] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="Print alert rules for Prometheus, and leave.")] = False,
) -> None:
    """Show how a running cache does.

    Four figures with their targets, then tables. Reads HTTP only; one look, unless --watch asks for more.
    """
    from ktransformer2.cli import looking
    from ktransformer2.errors import ConfigError

    if alerts or list_metrics:
        write(looking.alert_rules() if alerts else looking.listed_metrics())
        return
    if (as_json and as_csv) or sum([mock, replay is not None, url is not None]) > 1:
        raise ConfigError("give one of --json and --csv, and one of --url, --replay and --mock")
    form: looking.Form = "json" if as_json else "csv" if as_csv else "text"
    show = looking.Shower(metric or ["cache_stats"], form, clears=watch is not None)
    if replay is not None:
        looks = looking.replayed(replay)
    else:
        looks = looking.made_up(watch) if mock else looking.fetched(url, key_file, watch)
    is_red = False
    for look in looks:
        if record is not None:
            looking.add_to(record, look)
        is_red = show(look)
        if check and is_red:
            break
    raise typer.Exit(EXIT_THRESHOLD if check and is_red else 0)
