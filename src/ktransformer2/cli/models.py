"""`ktransformer models`: what is on this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ktransformer2.cli.guard import reported, write
from ktransformer2.cli.options import JsonFlag

models = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@models.callback()
@reported
def listed(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List the models on this machine.

    Unpacked GGUF files in this package's cache directory, and what the hub's library keeps.
    """
    if context.invoked_subcommand is not None:
        return
    from ktransformer2.bench.report import table
    from ktransformer2.config import format_bytes
    from ktransformer2.models.inventory import local_models

    rows: list[dict[str, Any]] = [
        {
            "name": model.name,
            "form": model.form,
            "bytes": model.num_bytes,
            "context": model.context_tokens,
            "architecture": model.architecture,
            "path": str(model.path),
        }
        for model in local_models()
    ]
    if as_json:
        write(json.dumps({"models": rows}, indent=1) + "\n")
        return
    shown = [row | {"bytes": format_bytes(row["bytes"])} for row in rows]
    write((table(shown) or "No model yet: `ktransformer run MODEL` takes a folder, a file or a hub id.") + "\n")


@models.command()
@reported
def rm(
    name: Annotated[str, typer.Argument(help="A model of the list, by its name or the name of its folder.")],
) -> None:
    """Delete a model from the cache directory.

    It is unpacked or fetched again when it is loaded.
    """
    from ktransformer2.config import format_bytes
    from ktransformer2.models.inventory import remove

    gone = remove(name)
    write(f"Removed {gone.path}: {format_bytes(gone.num_bytes)}.\n")
