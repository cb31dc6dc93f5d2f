"""What a person types in a chat, turn by turn: lines, lines that go on, and blocks in triple quotes. Knows no chat.

a line                 one turn
a line that ends in \\  goes on in the next one
\"\"\" ... \"\"\"            everything between is one turn, a leading / too
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ktransformer2.errors import RequestError

FENCE = '"""'
PROMPT, MORE = ">>> ", "... "


@dataclass(frozen=True)
class Turn:
    """One thing that was said. A command begins with a slash outside of quotes."""

    text: str
    is_command: bool = False


def turns(read_line: Callable[[str], str | None]) -> Iterator[Turn]:
    """The turns of an input, empty ones left out. `read_line(prompt)` gives a line without its end; None: no more."""
    while (line := read_line(PROMPT)) is not None:
        quoted = line.lstrip().startswith(FENCE)
        text = (_block(line, read_line) if quoted else _continued(line, read_line)).strip("\n")
        if text.strip():
            yield Turn(text if quoted else text.strip(), is_command=not quoted and text.lstrip().startswith("/"))


def _block(first: str, read_line: Callable[[str], str | None]) -> str:
    rest: str | None = first.lstrip().removeprefix(FENCE)
    lines: list[str] = []
    while rest is not None:
        before, fence, _ = rest.partition(FENCE)
        lines.append(before)
        rest = None if fence else read_line(MORE)
    return "\n".join(lines)


def _continued(line: str, read_line: Callable[[str], str | None]) -> str:
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line(MORE) or "")
    return "\n".join(lines)


def is_interactive() -> bool:
    """Whether a person types."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_stdin(prompt: str) -> str | None:
    """A line of stdin without its end, with editing and history on a terminal; None at its end.

    Raises: RequestError for bytes that are no UTF-8, KeyboardInterrupt.
    """
    if sys.stdin is None:
        return None
    try:
        if is_interactive() and sys.stdout.isatty():
            return input(prompt)
        if is_interactive():
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline()
    except EOFError:
        return None
    except UnicodeError as error:
        raise RequestError("stdin is no UTF-8 text") from error
    return line.rstrip("\r\n") if line else None


def prepare_stdin() -> None:
    """Strict UTF-8; on a terminal the arrow keys work where Python has readline."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    if is_interactive() and importlib.util.find_spec("readline"):
        importlib.import_module("readline")
