"""Exit codes, and the guard around every command: what goes wrong becomes one line on stderr and a code.

0 ok   1 failed   2 usage   3 not reachable   4 does not fit   5 a threshold broken   130 Ctrl-C
"""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, ParamSpec

import typer

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_REACHABLE, EXIT_DOES_NOT_FIT, EXIT_THRESHOLD, EXIT_INTERRUPTED = 1, 2, 3, 4, 5, 130

P = ParamSpec("P")
_FLAGS = {
    "memory='auto'": "--memory auto",
    "kv='int8'": "--kv int8",
    "memory=": "--memory",
    "max_new_tokens": "--max-new-tokens",
}


def fail(message: str, code: int) -> NoReturn:
    """Ends the command with one line on stderr."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Errors of this package and Ctrl-C become a message and an exit code; anything else is a bug and shows itself."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        from ktransformer2.errors import (
            ConfigError,
            ContextLengthError,
            EmptyPromptError,
            KTransformerError,
            NoServerError,
            NotReachableError,
            OutOfMemoryError,
        )

        try:
            command(*args, **kwargs)
        except (ConfigError, EmptyPromptError) as error:
            fail(str(error), EXIT_USAGE)
        except (OutOfMemoryError, ContextLengthError) as error:
            fail(in_flags(str(error)), EXIT_DOES_NOT_FIT)
        except (NoServerError, NotReachableError) as error:
            fail(str(error), EXIT_NOT_REACHABLE)
        except KTransformerError as error:
            fail(str(error), EXIT_FAILED)
        except KeyboardInterrupt:
            fail("interrupted", EXIT_INTERRUPTED)

    return guarded


def in_flags(message: str) -> str:
    """What the library says of its own arguments, as a command line has them."""
    for argument, flag in _FLAGS.items():
        message = message.replace(argument, flag)
    return message


def _terminate(number: int, _: object) -> NoReturn:
    """An orderly end: what is open is closed, so that what was read is kept."""
    sys.exit(128 + number)


def start(app: typer.Typer) -> None:
    """Run a command line: the entry point of a console script."""
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the program ends
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold more than a terminal's encoding does
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except KeyboardInterrupt:  # outside of a command's own guard: while typer starts, or again while it tells of one
        sys.exit(EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while Python ends there is nobody to catch it: no traceback


@contextmanager
def to_stdout() -> Iterator[None]:
    """What is written to stdout inside the block arrives, or one message says why not. A reader that left is no fault:
    typer ends the program quietly.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the rest is tried again at the end
        fail(f"stdout cannot be written ({error})", EXIT_FAILED)


def write(text: str) -> None:
    """A piece of the result, on stdout at once."""
    with to_stdout():
        sys.stdout.write(text)
