"""What a command leaves on disk for the next one, and what it says of it on stderr. Knows no prompt.

Where blocks go is said once, at the first write of the process as soon as no answer is on its way; how much lies there
at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ktransformer2.cli.conversation import Message
    from ktransformer2.engine.llm import LLM

_WAYS_OUT = "--no-persist keeps nothing, `ktransformer cache clear` deletes it."


class Keeping:
    """`model`: what was loaded, as it was named."""

    def __init__(self, llm: LLM, model: str, console: Console) -> None:
        self.console = console
        self._llm, self._model = llm, model
        self._has_said_where = False
        self._keeps_chats = llm.tier_config.persist == "on"
        self.holds_chat = False  # whether what lies there is this chat

    def look(self) -> None:
        """Between two answers: where blocks go, if the first of them has been written since the last look."""
        lies = self._lies()
        if lies and not self._has_said_where:
            self._has_said_where = True
            self._say(f"What is read is kept on disk: {lies}; {_WAYS_OUT}")

    def end(self) -> None:
        """After `close`, which writes most: how much lies there now, once something was written."""
        lies = self._lies()
        if lies:
            self._say(f"Kept for the next time: {lies}" + ("." if self._has_said_where else f"; {_WAYS_OUT}"))

    def keep_chat(self, messages: Sequence[Message]) -> None:
        """Where blocks are kept, what was said is too, for `chat --continue`. A disk that cannot is told of once."""
        from ktransformer2.cli.last_chat import LastChat

        if not self._keeps_chats:
            return
        named = Path(self._model)
        model = str(named.absolute()) if named.exists() else self._model  # the next chat may begin in another folder
        try:
            LastChat(model, list(messages)).keep()
        except OSError as error:
            self._keeps_chats = False
            self._say(f"This conversation cannot be kept for --continue ({error}).")
        else:
            self.holds_chat = True

    def forget_chat(self) -> None:
        """What was said in this chat is not there any more. Raises: ConfigError where it cannot be deleted."""
        from ktransformer2.cli.last_chat import forget_last_chat

        if self.holds_chat:
            forget_last_chat()
            self.holds_chat = False

    def _lies(self) -> str:
        """How much lies where; empty while nothing was written."""
        from ktransformer2.config import format_bytes
        from ktransformer2.tiers.opening import disk_directory

        stats = self._llm.cache.tier_stats()
        if stats is None or not stats.written_blocks or "disk" not in stats.held_bytes:
            return ""
        held, limit = format_bytes(stats.held_bytes["disk"]), format_bytes(stats.limit_bytes["disk"])
        return f"{held} of at most {limit} in {disk_directory(self._llm.tier_config)}"

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", soft_wrap=True, highlight=False, markup=False)
