"""`/v1/cache/...` and `/metrics`: what the cache holds and why it missed. Figures are the monitor's, for everybody.

Invariants: whoever asks why hears of their own salts only; single blocks and pins are for admins; no answer holds text
or token ids.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from ktransformer2.cache.advice import Pin
from ktransformer2.monitor.prometheus import exposition
from ktransformer2.monitor.routes import MOST_BLOCKS, CacheRoutes, HttpRequest, HttpResponse
from ktransformer2.server.keys import Caller
from ktransformer2.server.problems import ApiError
from ktransformer2.server.schemas import PromptBody
from ktransformer2.server.service import Service
from ktransformer2.server.tools import Tools
from ktransformer2.server.turns import for_template

_MOST_PINS = 1000


class CacheDoor:
    """The cache of one service, for those who run it and those who ask why."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._figures: CacheRoutes | None = None
        self._pins: dict[str, Pin] = {}

    def figures(self, target: str, accept: str) -> HttpResponse:
        """`/metrics` and `/v1/cache/stats`, as the monitor serves them. Raises: ApiError."""
        if self._figures is None:
            cache, name, engine = self._service.facts.cache, self._service.names[0], self._service.engine
            self._figures = CacheRoutes(cache, name, exposition(cache, name, lambda: engine.stats))
        return self._figures.answer(HttpRequest("GET", target, accept))

    async def entries(self, caller: Caller, start: int, limit: int) -> dict[str, Any]:
        """Blocks one by one. Raises: ApiError."""
        _require_admin(caller)
        if not (0 <= start < 2**31 and 1 <= limit <= MOST_BLOCKS):
            raise ApiError(400, f"start is 0 or more, limit 1 to {MOST_BLOCKS}", "invalid_request", param="limit")
        page = await self._service.engine.call(lambda llm: llm.cache.list_blocks(start, limit))
        return dataclasses.asdict(page)

    async def explain(self, caller: Caller, body: PromptBody) -> dict[str, Any]:
        """What the cache has of a prompt under the caller's own salt, and why not more. Raises: ApiError."""
        ids, salt = await self._ids(body), caller.salt(body.cache_salt)
        found = await self._service.engine.call(lambda llm: llm.cache.explain(ids, salt, across_salts=False))
        return dataclasses.asdict(found) | {"text": str(found)}

    async def pin(self, caller: Caller, body: PromptBody) -> dict[str, Any]:
        """What is cached of a prompt stays until it is unpinned. Raises: ApiError."""
        _require_admin(caller)
        if len(self._pins) >= _MOST_PINS:
            raise ApiError(409, f"{_MOST_PINS} pins are held; unpin some", "too_many_pins")
        ids, salt = await self._ids(body), caller.salt(body.cache_salt)
        pin = await self._service.engine.call(lambda llm: llm.cache.advice.pin(ids, salt))
        if pin is None:
            raise ApiError(409, "pins would hold more of the memory than pinned_share_ratio allows", "no_room_for_pin")
        if not pin.num_tokens:
            raise ApiError(409, "no whole block of this prompt is cached; ask it once, then pin it", "nothing_cached")
        name = f"pin-{secrets.token_hex(8)}"
        self._pins[name] = pin
        return {"id": name, "num_tokens": pin.num_tokens}

    def pins(self, caller: Caller) -> dict[str, Any]:
        """Raises: ApiError."""
        _require_admin(caller)
        return {"data": [{"id": name, "num_tokens": pin.num_tokens} for name, pin in self._pins.items()]}

    async def unpin(self, caller: Caller, name: str) -> dict[str, Any]:
        """Raises: ApiError."""
        _require_admin(caller)
        pin = self._pins.get(name)
        if pin is None:
            raise ApiError(404, "no such pin; GET /v1/cache/pins lists them", "not_found")
        await self._service.engine.call(lambda llm: llm.cache.advice.unpin(pin))
        self._pins.pop(name, None)
        return {"id": name, "deleted": True}

    async def _ids(self, body: PromptBody) -> list[int]:
        given = [part for part in (body.prompt, body.token_ids, body.messages) if part is not None]
        if len(given) != 1:
            raise ApiError(400, "give one of prompt, token_ids and messages", "invalid_request", param="prompt")
        prompts = self._service.prompts
        if body.messages is not None:
            tools = Tools.of(body.tools, None, self._service.limits.schema_bytes)
            said, template = for_template(self._service, body.messages, tools)
            ids = await prompts.chat(said, **template)
        else:
            ids = await prompts.encode(body.token_ids or [] if body.prompt is None else body.prompt)
        self._service.check_length(ids)
        if not ids or not all(0 <= token < 2**31 for token in ids):
            raise ApiError(400, "a prompt has at least one token id, each 0 to 2^31 - 1", "invalid_request")
        return ids


def _require_admin(caller: Caller) -> None:
    if not caller.is_admin:
        raise ApiError(403, "this needs an admin's key", "admin_only", kind="permission_error")
