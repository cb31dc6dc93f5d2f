"""`ktransformer models`: what is on this machine, and which architectures are served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ktransformer2.cli.guard import reported, write
from ktransformer2.cli.options import JsonFlag

models = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@models.callback()
@reported
def listed(
    context: typer.Context,
    architectures: Annotated[
        bool, typer.Option("--architectures", help="Instead: the model types that are served or refused, and why.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the models on this machine.

    Unpacked GGUF files in this package's cache directory, and what the hub's library keeps.
    """
    if context.invoked_subcommand is not None:
        return
    if architectures:
        write(_architectures(as_json=as_json))
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


def _architectures(*, as_json: bool) -> str:
    """What the sweep over the pinned transformers found; a loaded model is examined all the same."""
    from ktransformer2.bench.models_page import read_list
    from ktransformer2.bench.report import table

    found = read_list()
    if as_json:
        return json.dumps(found, indent=1) + "\n"
    rows = [
        {
            "model type": row["model_type"],
            "outcome": row["outcome"],
            "runner": row["runner"],
            "layer groups, or reason": _groups_or_reason(row),
        }
        for row in sorted(found["architectures"], key=lambda row: (row["outcome"] != "served", row["model_type"]))
    ]
    served = sum(row["outcome"] == "served" for row in rows)
    return (
        f"{table(rows)}\n\n{served} of {len(rows)} model types of transformers {found['transformers']} are served. A "
        "model is examined when it is loaded, and refused by the same rules.\n"
    )


def _groups_or_reason(row: Mapping[str, str]) -> str:
    return "; ".join(filter(None, (row["groups"], row["reason"])))


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
