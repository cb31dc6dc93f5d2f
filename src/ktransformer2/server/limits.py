"""What one server takes on, and what each caller may hold of it. Knows no request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ktransformer2.config import format_bytes
from ktransformer2.server.problems import ApiError


@dataclass(frozen=True)
class Limits:
    """body_bytes      the largest request body
    completions     answers to one request, over all its prompts
    schema_bytes    the largest JSON schema, and all tools of a request together
    request_s       seconds from where the engine takes a request to its last byte
    concurrent      requests of one key at once
    kv_bytes        bytes of cache that the running requests of one key may need; None: no bound but the cache's own
    ping_s          seconds without news after which a stream sends a comment, so that no proxy cuts it
    drain_s         seconds that running requests have left when the server stops
    stored_tokens   tokens of the conversations kept for `previous_response_id`, over all keys
    """

    body_bytes: int = 16 * 2**20
    completions: int = 16
    schema_bytes: int = 64 * 1024
    request_s: float = 600.0
    concurrent: int = 64
    kv_bytes: int | None = None
    ping_s: float = 15.0
    drain_s: float = 30.0
    stored_tokens: int = 2**20


class Ledger:
    """What callers hold now, of one thing. Used from the event loop only."""

    def __init__(self, what: str, most: int | None) -> None:
        """`what` names the thing in the message; `most`: for one caller, None: no bound."""
        self._what, self._most = what, most
        self._held: Counter[str] = Counter()

    def take(self, name: str, amount: int, *, in_bytes: bool = False) -> None:
        """Raises: ApiError, 429 where waiting helps and 400 where it does not; then nothing is taken."""
        shown = format_bytes if in_bytes else str
        if self._most is not None and amount > self._most:
            raise ApiError(
                400,
                f"this request asks for {shown(amount)} {self._what}; allowed: {shown(self._most)} at once",
                "above_quota",
            )
        if self._most is not None and self._held[name] + amount > self._most:
            raise ApiError(
                429,
                f"this key holds {shown(self._held[name])} {self._what} and asks for {shown(amount)} more; allowed: "
                f"{shown(self._most)} at once. Wait until one of its requests has ended",
                "quota_exceeded",
                kind="rate_limit_error",
            )
        self._held[name] += amount

    def give(self, name: str, amount: int) -> None:
        self._held[name] -= amount
        if not self._held[name]:
            del self._held[name]
