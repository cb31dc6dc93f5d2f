"""Every command of `ktransformer`, under the one that lists them. Importing this imports typer, and nothing heavier."""

from __future__ import annotations

from typing import Annotated

import typer

from ktransformer2.cli.bench import bench
from ktransformer2.cli.cache import cache
from ktransformer2.cli.chat import chat
from ktransformer2.cli.config import config
from ktransformer2.cli.demo import demo
from ktransformer2.cli.doctor import doctor
from ktransformer2.cli.models import models
from ktransformer2.cli.plan import plan
from ktransformer2.cli.run import run
from ktransformer2.cli.serve import serve
from ktransformer2.cli.trace import trace
from ktransformer2.cli.usage import Commands

app = typer.Typer(
    name="ktransformer",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # drawing help with rich takes as long as all the rest of --help together
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from ktransformer2 import __version__

        typer.echo(f"ktransformer2 {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A dynamic KV cache for transformers: memory that follows the text."""


for command in (run, chat, serve, plan, demo, doctor, bench):
    app.command()(command)
app.add_typer(cache, name="cache")
app.add_typer(models, name="models")
app.add_typer(config, name="config")
app.add_typer(trace, name="trace")
