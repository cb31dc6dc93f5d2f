"""Running commands in this process, and comparing what people see with what they saw before."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ktransformer2.cli.commands import app
from tests.conftest import REPOSITORY

CLI = [sys.executable, "-m", "ktransformer2.cli"]
SNAPSHOTS = REPOSITORY / "tests" / "snapshots"


def invoke(*arguments: str | Path, stdin: str = "") -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, env={"COLUMNS": "100"})


def failed(result: Any, code: int) -> str:
    """The message of a command that failed as it should: one on stderr, nothing on stdout, no exception."""
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    return str(lines[0])


def assert_as_before(name: str, text: str) -> None:
    """`text` is what the snapshot `name` holds. UPDATE_SNAPSHOTS=1 writes it anew: read it before you commit it."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} holds another text; UPDATE_SNAPSHOTS=1 writes it anew"
