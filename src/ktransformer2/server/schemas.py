"""What clients send, as pydantic models: the OpenAPI file is made of them. Knows no engine but `SamplingParams`.

A field that is not known here changes nothing and is named in the answer (`ktransformer.ignored_fields`); one that
would change the meaning, and is not served, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.server.problems import ApiError

MOST_TOP_LOGPROBS = 20
_MOST_IGNORED = 32
_SEEDS = 2**63
# What must have one of these values where a client names it: anything else would be another answer than was asked for.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "background": (None, False),
    "conversation": (None,),
    "truncation": (None, "disabled"),
}
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
Logit = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


class Body(BaseModel):
    """What every generating route takes."""

    model_config = ConfigDict(extra="allow")
    model: str
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=_SEEDS)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, Logit] | None = None
    ignore_eos: bool | None = None
    cache_salt: str = Field("", max_length=256)

    @property
    def ignored(self) -> list[str]:
        """Fields that changed nothing. Raises: ApiError for one that would have to."""
        named = self.model_extra or {}
        for name, allowed in _ONLY.items():
            if named.get(name) not in allowed:
                raise ApiError(400, f"{name} is not served; leave it out", "unsupported_parameter", param=name)
        return sorted(name[:64] for name in named if name not in _ONLY)[:_MOST_IGNORED]

    def sampling(self, **more: Any) -> SamplingParams:
        """OpenAI's defaults: temperature 1. `more` are fields of `SamplingParams`. Raises: RequestError."""
        named = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "logit_bias": None if self.logit_bias is None else self._biases(),
            "seed": None if self.seed is None else self.seed % _SEEDS,
            **{
                name: getattr(self, name)
                for name in (
                    "top_p",
                    "min_p",
                    "presence_penalty",
                    "frequency_penalty",
                    "repetition_penalty",
                    "stop",
                    "stop_token_ids",
                    "ignore_eos",
                )
            },
        }
        return SamplingParams(**{name: value for name, value in named.items() if value is not None}, **more)

    def _biases(self) -> dict[int, float]:
        wrong = [token for token in self.logit_bias or {} if not _TOKEN_ID.fullmatch(token)]
        if wrong:
            raise ApiError(400, f"logit_bias: {wrong[0][:40]!r} is no token id", "invalid_request", param="logit_bias")
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}


class CompletionBody(Body):
    """`POST /v1/completions`: text or token ids, one prompt or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    n: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    stream_options: StreamOptions | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    return_progress: bool = False
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    stream_options: StreamOptions | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`. `input`: a text, or items; `store`: keep it, to go on from with `previous_response_id`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None


class TokenizeBody(BaseModel):
    """`POST /tokenize`: `content` (llama.cpp's name) or `prompt` (vLLM's), or `messages` in the chat format."""

    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)
    with_pieces: bool = False


class DetokenizeBody(BaseModel):
    tokens: list[int]


class TemplateBody(BaseModel):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)


class PromptBody(BaseModel):
    """A prompt that the cache is asked about: a text, token ids, or messages."""

    prompt: str | list[int] | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)
    cache_salt: str = Field("", max_length=256)
