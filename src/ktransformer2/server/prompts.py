"""From request bodies to token ids, by a thread of its own: a long text must hold up neither steps nor the event loop.

Works on a copy of the engine's tokenizer. Templates run in Jinja's sandbox, as transformers has it; none comes from a
client. Knows no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from ktransformer2.engine.prompts import Message, Prompt, encoded, templated, templated_text
from ktransformer2.server.conversations import Said, continued
from ktransformer2.server.facts import Facts
from ktransformer2.server.grammar import Grammar, Grammars

T = TypeVar("T")
_KEPT_PIECES = 65_536
_MODEL = "this model"  # what errors call it: clients see no path


class Prompts:
    """The tokenizer of one model, for the event loop."""

    def __init__(self, facts: Facts) -> None:
        self._tokenizer, self._end_tokens = facts.tokenizer, facts.end_tokens
        self._grammars: Grammars | None = None  # made by the first who wants one
        self.piece = lru_cache(_KEPT_PIECES)(self._piece)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ktransformer-tokenizer")

    async def encode(self, prompt: Prompt) -> list[int]:
        """Raises: EmptyPromptError, RequestError."""
        return await self._run(lambda: encoded(self._tokenizer, prompt))

    async def chat(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Raises: as `engine.prompts.templated`."""
        return await self._run(lambda: templated(self._tokenizer, messages, _MODEL, **template))

    async def render(self, messages: Sequence[Message], **template: Any) -> str:
        """What `chat` gives the ids of. Raises: as `chat`."""
        return await self._run(lambda: templated_text(self._tokenizer, messages, _MODEL, **template))

    async def continued(self, ids: Sequence[int], said: Said) -> list[int]:
        """The ids, with those of the last answer as the model wrote them."""
        return await self._run(lambda: continued(ids, said, self._text))

    async def constraint(self, schema: Mapping[str, Any]) -> Callable[[], Grammar]:
        """What keeps an answer to a JSON schema. Raises: ApiError."""
        return await self._run(lambda: self._compile(schema))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        return await self._run(lambda: self._text(list(token_ids)))

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The `piece` of each."""
        return await self._run(lambda: list(map(self._piece, token_ids)))

    def _piece(self, token_id: int) -> str:
        """One token alone; U+FFFD where it is part of a character."""
        return self._text([token_id])

    def begins_twice(self, token_ids: Sequence[int]) -> bool:
        """Whether the prompt has two begin-of-text tokens in front: the template's, and one that a client wrote."""
        begin = getattr(self._tokenizer, "bos_token_id", None)
        return begin is not None and list(token_ids[:2]) == [begin, begin]

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)

    def _compile(self, schema: Mapping[str, Any]) -> Callable[[], Grammar]:
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer, self._end_tokens)
        return self._grammars.json_schema(schema)

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    async def _run(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, task)
