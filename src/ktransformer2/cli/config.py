"""`ktransformer config`: every knob with its value and its origin; which files are read; whether they are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformer2.cli.guard import reported, write
from ktransformer2.cli.options import JsonFlag

if TYPE_CHECKING:
    from ktransformer2.settings import Settings

config = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@config.callback()
def options() -> None:
    """Show and check the settings.

    A flag wins over KTRANSFORMER_*, over the project's TOML, over the user's TOML, over the default.
    """


@config.command()
@reported
def show(
    origin: Annotated[
        bool, typer.Option("--origin", help="Also where each value came from, the default, and what chose that.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print every knob and its value."""
    from ktransformer2 import settings
    from ktransformer2.bench.report import table

    rows = _rows(settings.resolve())
    if as_json:
        write(json.dumps({"knobs": rows}, indent=1) + "\n")
        return
    columns = ["name", "value", "unit", "also_known_as"]
    if origin:
        columns = ["name", "value", "origin", "unit", "default", "also_known_as", "chosen_by"]
    write(table([{column.replace("_", " "): _shown(row, column) for column in columns} for row in rows]) + "\n")


def _rows(settings: Settings) -> list[dict[str, Any]]:
    from ktransformer2.settings import knobs

    return [
        {
            "name": name,
            "value": settings.values[name],
            "origin": settings.origins[name],
            "unit": knob.unit,
            "default": knob.default,
            "also_known_as": knob.about.get("seed", ""),
            "chosen_by": knob.about.get("chosen_by", ""),
            "effect": knob.about["effect"],
            "cost": knob.about.get("cost", ""),
        }
        for name, knob in knobs().items()
    ]


def _shown(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if row["unit"] == "bytes" and isinstance(value, int):
        return _exact_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _exact_bytes(num_bytes: int) -> str:
    """8MiB, 4GB: what a person would have written, and nothing rounded."""
    units = (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6))
    whole = [f"{num_bytes // size}{unit}" for unit, size in units if num_bytes and num_bytes % size == 0]
    return whole[0] if whole else f"{num_bytes:,}"


@config.command()
@reported
def path(as_json: JsonFlag = False) -> None:
    """Print the files that are read, the one that wins first."""
    from ktransformer2 import settings

    project = settings.project_file() or Path.cwd() / settings.PROJECT_FILE
    rows = [
        {"file": str(place), "whose": whose, "found": place.is_file()}
        for whose, place in (("project", project), ("user", settings.user_file()))
    ]
    if as_json:
        write(json.dumps({"files": rows}, indent=1) + "\n")
        return
    write("".join(f"{row['file']}  ({row['whose']}{'' if row['found'] else ', not there'})\n" for row in rows))


@config.command()
@reported
def check(
    file: Annotated[Path | None, typer.Argument(help="A TOML file; else every file that is read.", exists=True)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check the settings; exits with 2 where one is wrong."""
    from ktransformer2 import settings

    if file is not None:
        sources = [settings.read_file(file)]
        settings.merge(sources)
    else:
        settings.resolve()
        sources = [settings.read_file(place) for place in settings.files()]
    if as_json:
        rows = [{"file": source.name, "settings": sorted(source.values)} for source in sources]
        write(json.dumps({"files": rows}, indent=1) + "\n")
        return
    lines = [f"{source.name}: {len(source.values)} settings, all right\n" for source in sources]
    write("".join(lines) or "No file is read here; `ktransformer config path` says where one may lie.\n")
