"""What a chat understands beside questions: one function a command, listed with its line of help. Knows no terminal.

What a command says goes to the chat's console. Raises: ConfigError; nothing has changed then.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ktransformer2.errors import ConfigError

if TYPE_CHECKING:
    from ktransformer2.cli.chat import Chat
    from ktransformer2.engine.snapshot import Snapshot


class Command(NamedTuple):
    """`obey(chat, argument)` does it; an `argument` in brackets may be left out."""

    obey: Callable[[Chat, str], None]
    argument: str
    help: str


def obey(chat: Chat, text: str) -> bool:
    """Carry out a line that begins with a slash. False: it says goodbye."""
    name, _, argument = text.removeprefix("/").partition(" ")
    if name in _GOODBYES:
        return False
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, *_GOODBYES], n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them."
        raise ConfigError(f'unknown command /{name}; {hint} A text that begins with a slash goes into """ """')
    command = COMMANDS[name]
    if command.argument and not command.argument.startswith("[") and not argument.strip():
        raise ConfigError(f"/{name} wants {command.argument}")
    command.obey(chat, argument.strip())
    return True


def _help(chat: Chat, _: str) -> None:
    lines = [(f"/{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()]
    lines += [("/bye", "leave; Ctrl-D too"), ("Ctrl-C", "stop the answer and keep it; at the prompt: leave")]
    lines += [('""" ... """', "a text of several lines"), ("... \\", "the line goes on in the next one")]
    width = max(len(left) for left, _ in lines)
    chat.say("\n".join(f"{left.ljust(width)}  {right}" for left, right in lines))


def _clear(chat: Chat, _: str) -> None:
    num_turns = len(chat.conversation.turns)
    chat.conversation.clear()
    chat.keeping.forget_chat()
    kept = "; the system text is kept" if chat.conversation.system else ""
    chat.say(f"Forgot {num_turns} messages{kept}. Their blocks stay cached until room is needed.")


def _system(chat: Chat, text: str) -> None:
    if text:
        chat.conversation.system = text
    chat.say(f"System text: {chat.conversation.system or 'none'}")


def _file(chat: Chat, name: str) -> None:
    attached = chat.conversation.attached
    if not name:
        chat.say(f"Taken off: {', '.join(attached) or 'nothing was attached'}.")
        attached.clear()
        return
    path = Path(name).expanduser()
    num_characters = chat.conversation.attach(path)
    chat.say(f"{path.name}: {num_characters:,} characters go in front of your next question.")


def _save(chat: Chat, name: str) -> None:
    chat.conversation.save(Path(name).expanduser())
    chat.say(f"Wrote {len(chat.conversation.messages)} messages to {name}.")


def _load(chat: Chat, name: str) -> None:
    chat.conversation.load(Path(name).expanduser())
    chat.say(f"Read {len(chat.conversation.messages)} messages from {name}.")


def _stats(chat: Chat, name: str) -> None:
    from ktransformer2.engine.snapshot import Snapshot

    snapshot = Snapshot(chat.llm.cache.stats(), chat.llm.stats())
    if not name:
        chat.say("\n".join(f"{what:<12}{value}" for what, value in figures(chat, snapshot)))
        return
    path = Path(name).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(snapshot.as_json(), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}); name a new file") from error
    chat.say(f"Wrote all counters to {name}; ktransformer doctor --live --stats {name} reads them.")


def figures(chat: Chat, snapshot: Snapshot) -> list[tuple[str, str]]:
    """What /stats shows: (name, words)."""
    from ktransformer2.config import format_bytes

    cache, engine, config = snapshot.cache, snapshot.engine, chat.llm.cache.config
    held, limit, peak = (format_bytes(n) for n in (cache.held_bytes, cache.limit_bytes, cache.peak_bytes))
    return [
        ("model", f"{chat.llm.source}, context {chat.llm.cache.geometry.max_positions:,} tokens"),
        ("messages", f"{len(chat.conversation.messages)}"),
        ("tokens", f"{engine.prompt_tokens:,} in ({engine.cached_tokens:,} cached), {engine.decode_tokens:,} decoded"),
        ("KV", f"{held} of {limit}, peak {peak}"),
        ("blocks", f"{cache.num_blocks} of {config.block_tokens} tokens, form {config.kv}"),
        ("growth", f"{cache.growth_events} growths, {cache.shrink_events} shrinks"),
        ("holes", f"fragmentation {cache.fragmentation_ratio:.2f}"),
        ("evictions", ", ".join(f"{count} for {cause}" for cause, count in cache.evictions.items()) or "none"),
    ]


_GOODBYES = ("bye", "exit", "quit")
COMMANDS = {
    "help": Command(_help, "", "this list"),
    "clear": Command(_clear, "", "forget the conversation"),
    "system": Command(_system, "[TEXT]", "set the system text; without one: show it"),
    "file": Command(_file, "[PATH]", "put a text in front of the next question; without one: take it off again"),
    "save": Command(_save, "FILE", "write the messages as JSON"),
    "load": Command(_load, "FILE", "go on from such a file"),
    "stats": Command(_stats, "[FILE]", "what the cache holds and did; with a file: all counters as JSON"),
}
