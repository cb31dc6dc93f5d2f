"""`ktransformer`: the door for people. stdout is the result, stderr the progress; every error is one clear message.

One file a command; `commands` lists them, `guard` has exit codes and errors, `usage` what typer refuses, `options` what
commands share. Knows how to ask the engine, the demo and the benches, and nothing of how they work. Nothing heavy is
imported before a command runs: `--help` imports no torch. This file itself imports nothing, so that Ctrl-C is heeded
from the first moment on.
"""

from __future__ import annotations


def main() -> None:
    """The entry point of the `ktransformer` command."""
    try:
        from ktransformer2.cli.commands import app
        from ktransformer2.cli.guard import start
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    start(app)


def monitor_main() -> None:
    """The entry point of the `ktransformer-monitor` command."""
    try:
        from ktransformer2.cli.guard import start
        from ktransformer2.cli.monitor import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    start(app)
