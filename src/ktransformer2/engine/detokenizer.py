"""Text from tokens, piece by piece: never half a character, never part of a stop string. Knows no request.

A tokenizer's text for some tokens depends on their neighbours (bytes of one character, a leading space), so new text
is the difference between two decodings of a short window: with and without the new tokens. A window that ends in
U+FFFD may end inside a character and is held back, but never longer than a character can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three tokens can be an unfinished one; with more tokens than this
# held back, only the last three characters can still change and the rest is invalid text that stays as it is.
_MAX_HELD_TOKENS = 8
_MAX_UNFINISHED = 3
_CONTEXT_TOKENS = 4


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    chat_template: Any

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Vocabulary:
    """How tokens read, and which of them end an answer. Without a tokenizer answers are tokens only."""

    tokenizer: Tokenizer | None = None
    end_tokens: frozenset[int] = frozenset()


class Detokenizer:
    """The text of one answer as its tokens arrive; `text` is what was given out so far, stop strings taken off.

    Invariants: pieces given out are never taken back; no piece ends inside a character; `text` holds no stop string.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # context, then tokens whose text is not all given out
        self._num_context = 0
        self._num_given = 0  # characters of the window's text that were given out
        self._pieces: list[str] = []
        self._stops = StopStrings(stop)
        if tokenizer is not None and prompt_ids:
            self._begin_after(list(prompt_ids[-_CONTEXT_TOKENS:]))

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met, if any: nothing comes after it."""
        return self._stops.met

    def push(self, token_id: int) -> str:
        """New text that this token settles. Side effect: once `stop_string` is set, every later piece is empty."""
        if self._tokenizer is None:
            return ""
        self._window.append(token_id)
        return self._give(self._stops.push(self._settled_text()))

    def flush(self) -> str:
        """What was held back, when no token follows."""
        if self._tokenizer is None:
            return ""
        rest = self._decode(self._window)[self._num_given :]
        self._window, self._num_context, self._num_given = [], 0, 0
        return self._give(self._stops.push(rest) + self._stops.flush())

    def _begin_after(self, context: list[int]) -> None:
        before = self._decode(context)
        if before and not before.endswith(_REPLACEMENT):
            self._window, self._num_context, self._num_given = context, len(context), len(before)

    def _settled_text(self) -> str:
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            new = text[self._num_given :]
            if new:  # the tokens that gave it become the next window's context
                self._window = self._window[self._num_context :]
                self._num_context = len(self._window)
                self._num_given = len(self._decode(self._window))
            return new
        if len(self._window) - self._num_context < _MAX_HELD_TOKENS:
            return ""
        settled = len(text) - _MAX_UNFINISHED
        new = text[self._num_given : settled]
        self._num_given = max(self._num_given, settled)
        return new

    def _give(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids or self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class StopStrings:
    """Cuts a stream of text before the first stop string, holding back an end that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.met: str | None = None

    def push(self, text: str) -> str:
        """Text that can go out now. The stop string that begins first counts; of two at one place, the first named."""
        if self.met is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, rank) for rank, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0]
        if found:
            at, rank = min(found)
            self.met, self._held = self._stops[rank], ""
            return text[:at]
        keep = max(longest_beginning(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return "" if self.met is not None else held


def longest_beginning(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
