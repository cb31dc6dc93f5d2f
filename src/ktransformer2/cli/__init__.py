"""`ktransformer`: the door for people. stdout is the result, stderr the progress; every error is one clear message.

One file a command; `guard` has exit codes and errors, `options` what commands share. Knows how to ask the engine, the
demo and the benches, and nothing of how they work. Nothing heavy is imported before a command runs: `--help` imports
no torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ktransformer2.cli.bench import bench
from ktransformer2.cli.cache import cache
from ktransformer2.cli.chat import chat
from ktransformer2.cli.config import config
from ktransformer2.cli.demo import demo
from ktransformer2.cli.doctor import doctor
from ktransformer2.cli.guard import start
from ktransformer2.cli.models import models
from ktransformer2.cli.plan import plan
from ktransformer2.cli.run import run

app = typer.Typer(
    name="ktransformer",
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


for command in (run, chat, plan, demo, doctor, bench):
    app.command()(command)
app.add_typer(cache, name="cache")
app.add_typer(models, name="models")
app.add_typer(config, name="config")


def main() -> None:
    """The entry point of the `ktransformer` command."""
    start(app)
