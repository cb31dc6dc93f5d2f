"""One served model, as every route sees it: is it there, which ids has this prompt, begin these requests.

Knows no route and no HTTP but for what is told to whom.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from ktransformer2.engine.outputs import StreamChunk
from ktransformer2.errors import KTransformerError
from ktransformer2.server.engine_thread import EngineThread, Work
from ktransformer2.server.facts import Facts
from ktransformer2.server.keys import Caller
from ktransformer2.server.limits import Ledger, Limits
from ktransformer2.server.problems import ApiError, refusal
from ktransformer2.server.prompts import Prompts
from ktransformer2.server.streams import Stream


class Service:
    """For the event loop only."""

    def __init__(self, engine: EngineThread, names: Sequence[str], limits: Limits) -> None:
        """`names`: what clients may call the model; the first is its own."""
        self.engine, self.names, self.limits = engine, tuple(names), limits
        self._kv = Ledger("of cache for running requests", limits.kv_bytes)
        self._prompts: Prompts | None = None

    @property
    def facts(self) -> Facts:
        """Raises: ApiError 503 before the model is there, and after it is gone."""
        if self.engine.facts is None or self.engine.state in ("failed", "ended"):
            raise self._unavailable()
        return self.engine.facts

    def check_health(self) -> None:
        """Raises: ApiError 503 unless requests are taken."""
        if self.engine.state != "ready":
            raise self._unavailable()

    def _unavailable(self) -> ApiError:
        code = 503 if self.engine.state == "loading" else "unavailable"
        return ApiError(503, self.engine.why_not(), code, kind="unavailable_error")

    @property
    def prompts(self) -> Prompts:
        """Raises: as `facts`."""
        if self._prompts is None:
            self._prompts = Prompts(self.facts)
        return self._prompts

    def check_model(self, name: str) -> None:
        """Raises: ApiError 404."""
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here; there is: {known}", "model_not_found", param="model"
            )

    def reserve(self, asked: int | None, prompt_tokens: int) -> int:
        """Tokens for the answer: what was asked for, else the default or what the context has left, if that is less."""
        return asked or max(1, min(self.facts.max_new_tokens, self.facts.context_tokens - prompt_tokens))

    def check_answers(self, num_answers: int) -> None:
        """Raises: ApiError for more answers to one request than `Limits.completions`."""
        if num_answers > self.limits.completions:
            message = f"{num_answers} answers to one request; allowed: {self.limits.completions}"
            raise ApiError(400, message, "too_many_choices", param="n")

    def check_length(self, prompt_ids: Sequence[int]) -> None:
        """Before the engine's thread looks at every token. Raises: ApiError for more than the context holds."""
        most = self.facts.context_tokens
        if len(prompt_ids) > most:
            message = f"the prompt has {len(prompt_ids)} tokens; the context of this model holds {most}"
            raise ApiError(400, message, "context_length_exceeded")

    async def begin(self, caller: Caller, works: Sequence[Work], cache_salt: str) -> Stream:
        """Close the stream in any case. Raises: ApiError; then nothing was begun."""
        facts = self.facts
        self.check_answers(sum(work.params.n for work in works))
        for work in works:
            self.check_length(work.prompt_ids)
        need = sum(
            facts.kv_bytes(len(work.prompt_ids) + work.params.n * (work.params.max_new_tokens or 0)) for work in works
        )
        self._kv.take(caller.name, need, in_bytes=True)
        try:
            stream = await self.engine.submit(works, caller.salt(cache_salt))
        except BaseException as error:
            self._kv.give(caller.name, need)
            if isinstance(error, KTransformerError):
                raise refusal(error) from error
            raise
        stream.when_closed(lambda: self._kv.give(caller.name, need))
        return stream

    async def news(self, stream: Stream) -> AsyncIterator[StreamChunk | None]:
        """Every chunk; None now and then while there is none. Raises: as `Stream.read`; TimeoutError."""
        ends_s = time.monotonic() + self.limits.request_s
        while not stream.is_read:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            chunk = await stream.read(min(left_s, self.limits.ping_s))
            if chunk is not None or left_s > self.limits.ping_s:
                yield chunk

    async def close(self) -> None:
        """Let what runs end, for a while; then close the model. What is to last is kept."""
        await self.engine.stop(self.limits.drain_s)
        if self._prompts is not None:
            await asyncio.to_thread(self._prompts.close)
