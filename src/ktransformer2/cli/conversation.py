"""What was said in a chat, and what will be said next. Knows no model and no terminal.

Invariant: a question enters the conversation together with its answer, so one that was refused or broken off changes
nothing; what `load` refuses changes nothing either.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ktransformer2.cli.files import read_text
from ktransformer2.errors import ConfigError

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


@dataclass
class Conversation:
    """`turns` are questions and answers in turn; `attached` texts go in front of the next question, by their names."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    attached: dict[str, str] = field(default_factory=dict)
    _own_files: set[Path] = field(default_factory=set)

    @property
    def messages(self) -> list[Message]:
        """Everything, as a chat template takes it."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def asking(self, question: str) -> list[Message]:
        """The messages with this question behind them. The conversation is as before."""
        parts = [text.strip("\n") for text in self.attached.values()]
        return [*self.messages, {"role": "user", "content": "\n\n".join([*parts, question])}]

    def add(self, question: str, answer: str) -> None:
        """The question was answered; what was attached is part of it now."""
        self.turns += [self.asking(question)[-1], {"role": "assistant", "content": answer}]
        self.attached.clear()

    def attach(self, path: Path) -> int:
        """Put a text in front of the next question; its characters. Raises ConfigError."""
        self.attached[path.name] = text = read_text(path)
        return len(text)

    def clear(self) -> None:
        """Forget all but the system text."""
        self.turns.clear()
        self.attached.clear()

    def save(self, path: Path) -> None:
        """Write the messages as JSON. A file that this chat neither wrote nor read is never written over.

        Raises: ConfigError.
        """
        try:
            if path.exists() and path.resolve() not in self._own_files:
                raise ConfigError(f"{path} is there already; name another file")
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error})") from error
        self._own_files.add(path.resolve())

    def load(self, path: Path) -> None:
        """Go on from the messages of a file, in place of this conversation. Raises ConfigError."""
        text = read_text(path)
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON ({error})") from error
        wrong = why_no_messages(found)
        if wrong:
            raise ConfigError(f'{path}: {wrong}; wanted is a list of {{"role": "user", "content": "..."}}')
        self.go_on_from(found)
        self._own_files.add(path.resolve())

    def go_on_from(self, messages: list[Message]) -> None:
        """These were said before, in place of this conversation. `why_no_messages` must find nothing wrong."""
        system = [message["content"] for message in messages if message["role"] == "system"]
        self.system = system[0] if system else None
        self.turns = [dict(message) for message in messages if message["role"] != "system"]


def why_no_messages(found: object) -> str:
    """What is wrong with what a file holds in place of messages; empty: nothing."""
    if not isinstance(found, list) or not found:
        return "holds no list of messages"
    for place, message in enumerate(found):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f"message {place + 1} has not just a role and a content"
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            return f"message {place + 1} has a role or a content that is not allowed; roles: {', '.join(ROLES)}"
        if message["role"] == "system" and place:
            return f"message {place + 1} is a system text; only the first may be"
    return ""
