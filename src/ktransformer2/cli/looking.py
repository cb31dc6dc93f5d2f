"""Looks at a running cache: where they come from, how they are kept, how they are shown."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ktransformer2.bench.report import table
from ktransformer2.cli.files import read_text
from ktransformer2.cli.guard import write
from ktransformer2.errors import ConfigError
from ktransformer2.monitor import mock
from ktransformer2.monitor.client import DEFAULT_URL, MonitorClient, Observation
from ktransformer2.monitor.health import health
from ktransformer2.monitor.views import VIEWS, csv_row

Form = Literal["text", "json", "csv"]
_CLEAR = "\x1b[2J\x1b[H"
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True)
class Look:
    """One answer of a server, `at` seconds since 1970."""

    source: str
    at: float
    answer: dict[str, Any]


def client(url: str | None, key_file: Path | None) -> MonitorClient:
    key = read_text(key_file).strip() if key_file is not None else ""
    return MonitorClient(url or DEFAULT_URL, key)


def fetched(url: str | None, key_file: Path | None, every_s: float | None) -> Iterator[Look]:
    """One look, or one every `every_s` seconds until the reader leaves. Raises: NoServerError, ConfigError."""
    server = client(url, key_file)
    while True:
        yield Look(server.url, time.time(), server.stats())
        if every_s is None:
            return
        time.sleep(every_s)


def made_up(every_s: float | None) -> Iterator[Look]:
    tick = 0
    while True:
        yield Look("mock", time.time(), mock.answer(tick))
        if every_s is None:
            return
        time.sleep(every_s)
        tick += 1


def replayed(path: Path) -> Iterator[Look]:
    """The looks that `add_to` wrote. Raises ConfigError, with the line."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            found = json.loads(line)
            look = Look(str(found["source"]), float(found["at"]), dict(found["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} is no line that --record wrote") from error
        yield look


def add_to(path: Path, look: Look) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(look)) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}); name another place with --record") from error


class Shower:
    """Writes looks to stdout, in one form."""

    def __init__(self, metrics: Sequence[str], form: Form, *, clears: bool) -> None:
        """`clears`: on a terminal each look takes the place of the one before. Raises ConfigError."""
        for name in metrics:
            if name not in VIEWS:
                near = difflib.get_close_matches(name, VIEWS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(VIEWS)}"
                raise ConfigError(f"there is no metric {name!r}; {hint}")
        self._views = [VIEWS[name] for name in metrics]
        self._form = form
        is_terminal = sys.stdout.isatty()
        self._clears = clears and is_terminal
        self._colours = is_terminal and not os.environ.get("NO_COLOR")
        self._num_shown = 0

    def __call__(self, look: Look) -> bool:
        """Whether a figure is red."""
        seen = Observation.from_json(look.answer)
        text = {"text": self._text, "json": self._json, "csv": self._csv}[self._form](look, seen)
        self._num_shown += 1
        write(text)
        return any(figure.mark == "RED" for figure in health(seen.stats))

    def _text(self, look: Look, seen: Observation) -> str:
        when = datetime.fromtimestamp(look.at, UTC).strftime("%H:%M:%S")
        model = f"  {seen.model}" if seen.model else ""
        parts = [f"{look.source}{model}  {when} UTC, figures {seen.age_s:.1f} s old"]
        parts += [table(rows) for view in self._views for rows in view.tables(seen.stats) if rows]
        text = "\n\n".join(parts) + "\n"
        if self._colours:
            lines = (f"{_RED}{line}{_PLAIN}" if "  RED" in line else line for line in text.splitlines())
            text = "\n".join(lines) + "\n"
        between = "\n" if self._num_shown else ""
        return (_CLEAR if self._clears else between) + text

    def _json(self, look: Look, seen: Observation) -> str:
        figures = [dataclasses.asdict(figure) for figure in health(seen.stats)]
        about = {"source": look.source, "at": look.at, "model": seen.model, "age_s": seen.age_s}
        return json.dumps(about | {"health": figures, "cache": seen.stats.as_json()}) + "\n"

    def _csv(self, look: Look, seen: Observation) -> str:
        row = {"at": look.at, "model": seen.model} | csv_row(seen.stats)
        lines = io.StringIO()
        writer = csv.DictWriter(lines, list(row), lineterminator="\n")
        if not self._num_shown:
            writer.writeheader()
        writer.writerow(row)
        return lines.getvalue()


def listed_metrics() -> str:
    width = max(map(len, VIEWS))
    return "".join(f"{name.ljust(width)}  {view.about}\n" for name, view in VIEWS.items())


def alert_rules() -> str:
    """The rules that are shipped with the package."""
    return (resources.files("ktransformer2.monitor") / "alerts.yml").read_text(encoding="utf-8")
