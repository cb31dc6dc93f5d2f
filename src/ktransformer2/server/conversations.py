"""What was said, kept for `previous_response_id`: messages, tokens, the object that was answered. Knows no model.

Bounded over all, in tokens; who was used longest ago leaves. Invariant: a caller finds their own only, and is told of
another's the same as of none.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ktransformer2.server.problems import ApiError


@dataclass(frozen=True)
class Said:
    """One answered turn. `messages`: all up to it, without instructions; `prompt_ids`, `answer_ids`: as computed."""

    caller: str
    messages: tuple[dict[str, Any], ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    response: dict[str, Any]

    @cached_property
    def num_tokens(self) -> int:
        """What it is charged: its tokens, or its response at four characters a token if that is more."""
        return max(len(self.prompt_ids) + len(self.answer_ids), len(json.dumps(self.response)) // 4)


class Conversations:
    """Used from the event loop only."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._said: OrderedDict[str, Said] = OrderedDict()
        self._num_tokens = 0

    def keep(self, response_id: str, said: Said) -> None:
        """Those used longest ago make room; what is larger than all of it is not kept."""
        if said.num_tokens > self._most_tokens:
            return
        self._said[response_id] = said
        self._num_tokens += said.num_tokens
        while self._num_tokens > self._most_tokens:
            _, gone = self._said.popitem(last=False)
            self._num_tokens -= gone.num_tokens

    def find(self, response_id: str, caller: str) -> Said:
        """Raises: ApiError 404."""
        said = self._said.get(response_id)
        if said is None or said.caller != caller:
            raise ApiError(
                404,
                "no such response is kept: never stored, deleted, or gone to make room; send its messages as input",
                "response_not_found",
                param="previous_response_id",
            )
        self._said.move_to_end(response_id)
        return said

    def forget(self, response_id: str, caller: str) -> None:
        """Raises: ApiError 404."""
        self._num_tokens -= self.find(response_id, caller).num_tokens
        del self._said[response_id]


def continued(ids: Sequence[int], said: Said, text: Callable[[list[int]], str]) -> list[int]:
    """The ids of a conversation, with the tokens of the last answer as they were computed, where that is the same text.

    A tokenizer may cut an answer into other tokens than the model wrote; the blocks behind that place would not be
    found again. `ids` come from the template; where it rewrote earlier turns they are left as they are.
    """
    start, answer = len(said.prompt_ids), list(said.answer_ids)
    ids = list(ids)
    if not answer or tuple(ids[:start]) != said.prompt_ids or ids[start : start + len(answer)] == answer:
        return ids
    wanted = text(answer)
    low, high = 0, min(len(ids) - start, 4 * len(answer) + 8)
    while low < high:  # the text of more tokens is never shorter
        middle = (low + high) // 2
        if len(text(ids[start : start + middle])) < len(wanted):
            low = middle + 1
        else:
            high = middle
    if "\ufffd" in wanted or text(ids[start : start + low]) != wanted:
        return ids
    return ids[:start] + answer + ids[start + low :]
