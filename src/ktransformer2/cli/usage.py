"""What typer says of a wrong command line, in the words and the style of every other error. Knows no command."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ktransformer2.cli.guard import EXIT_USAGE, fail

_UsageError: type[Any] = typer.BadParameter.__bases__[0]  # click's, wherever typer keeps it
_PLACE = re.compile(r"^invalid value for '([^']*)'(?: / '[^']*')?: ")
_CHOICE, _QUOTED = re.compile(r"'([^']*)' is not one of (.*)"), re.compile(r"'([^']*)'")
_OPTION = re.compile(r"no such option: (\S+) \((?:Possible options: |Did you mean )(.*?)\??\)")


class Commands(TyperGroup):
    """A group of commands whose usage errors are one line on stderr and exit code 2."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        with _one_line():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _one_line():
            return super().invoke(ctx)


class Command(TyperCommand):
    """`Commands`, where there is only one."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        with _one_line():
            return super().make_context(*arguments, **extra)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            raise
        fail(_words(error), EXIT_USAGE)


def _words(error: Any) -> str:
    text = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    text = _PLACE.sub(r"\1: ", text[:1].lower() + text[1:])
    if ". Did you mean" in text:
        return text.replace(". Did you mean", "; did you mean")
    near: list[str] = []
    if got := _CHOICE.search(text):
        near = difflib.get_close_matches(got[1], _QUOTED.findall(got[2]), n=1, cutoff=0.5)
    elif got := _OPTION.fullmatch(text):
        text, near = f"no such option {got[1]!r}", got[2].split(", ")[:1]
    if near:
        return f"{text}; did you mean {near[0]!r}?"
    return text if error.ctx is None else f"{text}; `{error.ctx.command_path} --help` lists what there is"
