"""The last conversation, kept so that `chat --continue` goes on with it in a new process. Knows no terminal.

What was said lies in one JSON file of the user's data directory, readable by its owner alone; the keys and values lie
with the other blocks on disk and are found by its text. `/clear` in the chat and `ktransformer cache clear` delete it.

Invariants: the file appears whole or not at all; nothing is kept unless blocks are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import platformdirs

from ktransformer2.cli.conversation import Message, why_no_messages
from ktransformer2.cli.files import read_text
from ktransformer2.errors import ConfigError

_NAME = "last-chat.json"


def last_chat_path() -> Path:
    """Where it lies, there or not."""
    return Path(platformdirs.user_data_dir("ktransformer2", appauthor=False)) / _NAME


@dataclass(frozen=True)
class LastChat:
    """What was said, and with which model."""

    model: str
    messages: list[Message]

    @classmethod
    def read(cls) -> Self:
        """Raises: ConfigError where none was kept, or where its file holds none."""
        path = last_chat_path()
        if not path.is_file():
            raise ConfigError("no conversation was kept to go on with; `ktransformer chat` begins one")
        try:
            found = json.loads(read_text(path))
        except ValueError as error:
            raise _broken(path, f"it is no JSON ({error})") from error
        model, messages = (found.get("model"), found.get("messages")) if isinstance(found, dict) else (None, None)
        if not isinstance(model, str) or not model:
            raise _broken(path, "it names no model")
        if wrong := why_no_messages(messages):
            raise _broken(path, wrong)
        assert isinstance(messages, list), "checked above"
        return cls(model, messages)

    def keep(self) -> None:
        """In place of the one before. Raises: OSError."""
        from ktransformer2.models.store import replace_file

        path = last_chat_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = {"model": self.model, "messages": self.messages}
        replace_file(path, (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode())


def forget_last_chat() -> bool:
    """Delete it; whether there was one. Raises: ConfigError where it cannot be deleted."""
    path = last_chat_path()
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"{path} holds a conversation and cannot be deleted ({error})") from error
    return True


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} cannot be gone on with: {why}; delete it, or chat without --continue")
