"""Messages of a chat as clients send them -> as chat templates take them. Pure; knows no template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktransformer2.server.problems import ApiError

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_ROLES = {"developer": "system"}


def flat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every content one text; the role `developer` is `system`. Raises: ApiError for what is no text."""
    return [_flat(message, place) for place, message in enumerate(messages)]


def _flat(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise _wrong(place, "role", "a message has a role, such as user")
    return {**message, "role": _ROLES.get(role, role), "content": _text(message.get("content"), place)}


def _text(content: object, place: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(place, "content", "a content is a text, or a list of parts of type text")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise _wrong(place, "content", f"parts of type {str(kind)[:40]!r} are not served; send type text")
        texts.append(text)
    return "".join(texts)


def _wrong(place: int, field: str, message: str) -> ApiError:
    return ApiError(400, message, "invalid_request", param=f"messages[{place}].{field}")
