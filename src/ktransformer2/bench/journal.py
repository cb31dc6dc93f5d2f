"""What a long run has done so far, line by line in a file, so that one that was broken off goes on where it stopped.

Knows no scenario: a piece of work has a name, and a result that JSON can hold. Invariant: all lines of a file are of
one run, which its first line describes; a line that was cut short by the end of a process is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ktransformer2.errors import ConfigError


class Journal:
    """Results by the names of pieces of work."""

    def __init__(self, path: Path | None, run: Mapping[str, Any]) -> None:
        """`run` is what must be the same for results to belong together; `path`: None keeps nothing.

        Raises: ConfigError when the file is of another run, or no journal.
        """
        self._path = path
        self._done: dict[str, Any] = {}
        if path is None:
            return
        if path.exists() and (text := path.read_text()):
            self._read(path, text.splitlines(), dict(run))
            if not text.endswith("\n"):
                path.write_text(text + "\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"run": dict(run)}) + "\n")

    def __len__(self) -> int:
        return len(self._done)

    def piece(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, done now or by an earlier run. Side effect: what is done now is written at once."""
        if name not in self._done:
            result = work()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"piece": name, "result": result}) + "\n")
            self._done[name] = result
        return self._done[name]

    def _read(self, path: Path, lines: list[str], run: dict[str, Any]) -> None:
        try:
            before = json.loads(lines[0])["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no journal of a run; name another file, or delete it") from error
        other = sorted(key for key in {*before, *run} if before.get(key) != run.get(key))
        if other:
            was = ", ".join(f"{key}={before.get(key)!r}, now {run.get(key)!r}" for key in other)
            raise ConfigError(f"{path} is the journal of another run ({was}); name another file, or delete it")
        for line in lines[1:]:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut short
            self._done[entry["piece"]] = entry["result"]
