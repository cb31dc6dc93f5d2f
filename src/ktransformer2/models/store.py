"""The user's cache directory: converted models and remembered hashes. Files appear whole or not at all.

Knows no model. `KTRANSFORMER_CACHE` names another directory.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from ktransformer2.errors import ConfigError


@contextmanager
def written_into(directory: Path) -> Iterator[None]:
    """Whatever the system says against writing inside the block is a ConfigError that names the cache directory."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the cache directory {directory} cannot be written ({error}); make room or allow it, or name another with "
            "KTRANSFORMER_CACHE"
        ) from error


def cache_directory() -> Path:
    """Where this package keeps what it can make again; created when missing. Raises ConfigError where it cannot be."""
    named = os.environ.get("KTRANSFORMER_CACHE")
    directory = Path(named) if named else Path(platformdirs.user_cache_dir("ktransformer2", appauthor=False))
    with written_into(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def hash_memory() -> Path:
    """The file that remembers content hashes."""
    return cache_directory() / "file-hashes.json"


def write_atomically(path: Path, content: bytes) -> None:
    """`replace_file` in the cache directory, which is made where it is missing. Raises ConfigError."""
    with written_into(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never half of it; for its owner alone.

    Raises: OSError; the old content is there then.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty for a file that is missing or broken, since it can be made again."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
