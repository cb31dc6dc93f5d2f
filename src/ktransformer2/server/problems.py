"""What OpenAI's clients read of an error: status, `{"error": {"message", "type", "param", "code"}}`. Knows no route."""

from __future__ import annotations

from typing import Any

from ktransformer2.errors import (
    ContextLengthError,
    EngineClosedError,
    KTransformerError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
)

Body = dict[str, dict[str, Any]]


class ApiError(Exception):
    """An answer that is no success. `kind` is the field `type`."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | int,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.kind, self.param = status, message, code, kind, param

    @property
    def body(self) -> Body:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Whoever is told to come back is told when, in seconds."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


def refusal(error: Exception) -> ApiError:
    """What a request is told that was not begun."""
    match error:
        case ApiError():
            return error
        case ContextLengthError() | OutOfMemoryError():
            return ApiError(400, str(error).replace("max_new_tokens", "max_tokens"), "context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error), "invalid_request")
    return failure(error)


def failure(error: Exception) -> ApiError:
    """What a request is told that ended while it ran. A fault of ours is named, and what it says stays in the log."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), "queue_full", kind="rate_limit_error")
        case EngineClosedError():
            return ApiError(503, str(error), "unavailable", kind="unavailable_error")
        case TimeoutError():
            return ApiError(504, "the request took longer than this server allows", "timeout", kind="timeout_error")
        case OutOfMemoryError():
            return ApiError(503, str(error), "out_of_memory", kind="server_error")
        case KTransformerError():
            return ApiError(500, str(error), "failed", kind="server_error")
    return ApiError(500, f"an internal error ({type(error).__name__})", "internal_error", kind="server_error")
