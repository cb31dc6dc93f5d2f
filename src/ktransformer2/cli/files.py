"""Files that a person names: whether they can be written, and what text they hold. Errors name the file."""

from __future__ import annotations

from pathlib import Path

from ktransformer2.errors import ConfigError


def check_place(path: Path, option: str) -> None:
    """Raises ConfigError unless a file can be written there: found out now, not when all is computed."""
    try:
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; name another place with {option}") from error


def read_text(path: Path) -> str:
    """A text file's content. Raises ConfigError, also for bytes that are no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error
