"""All routes in one FastAPI application, behind the gate. Knows the paths; what they do stands in the file of each.

Invariant: every answer that is no success has OpenAI's error body, also for an unknown path and a body that is none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ktransformer2 import __version__
from ktransformer2.errors import KTransformerError
from ktransformer2.monitor.routes import HttpResponse
from ktransformer2.server.cache_routes import CacheDoor
from ktransformer2.server.chat import ChatCall
from ktransformer2.server.completions import CompletionCall
from ktransformer2.server.conversations import Conversations
from ktransformer2.server.engine_thread import EngineThread, Work
from ktransformer2.server.gate import Gate
from ktransformer2.server.keys import Caller, Keys
from ktransformer2.server.limits import Limits
from ktransformer2.server.problems import ApiError, failure, refusal
from ktransformer2.server.responses import ResponsesCall
from ktransformer2.server.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PromptBody,
    ResponsesBody,
    TemplateBody,
    TokenizeBody,
)
from ktransformer2.server.service import Service
from ktransformer2.server.sse import EventStream
from ktransformer2.server.status_line import watch
from ktransformer2.server.streams import Stream
from ktransformer2.server.tools import Tools
from ktransformer2.server.turns import for_template

T = TypeVar("T")


@dataclass(frozen=True)
class Access:
    """Who may ask. `own_names`: what a Host header may say; None: anything."""

    keys: Keys
    own_names: frozenset[str] | None


class AsciiJson(JSONResponse):
    """What clients sent may hold half characters; escaped, every text can be sent back."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class Call(Protocol):
    """A request to a generating route."""

    async def works(self) -> list[Work]: ...

    def result(self, stream: Stream) -> dict[str, Any]: ...

    def events(self, stream: Stream) -> AsyncIterator[bytes]: ...


def make_app(engine: EngineThread, names: list[str], access: Access, limits: Limits) -> Gate:
    """The ASGI application: its start-up starts `engine`, its shutdown stops it."""
    service = Service(engine, names, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        watching = asyncio.create_task(watch(engine))
        yield
        watching.cancel()
        await service.close()

    app = FastAPI(
        title="KTransformer2",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        default_response_class=AsciiJson,
    )
    _add_error_bodies(app)
    _add_facts(app, service)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_cache(app, CacheDoor(service))
    return Gate(app, access.keys, limits, access.own_names)


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


Asking = Annotated[Caller, Depends(_caller)]


def _add_facts(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 once the model is there and while it answers."""
        service.check_health()
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    facts = service.facts
    named = {"id": name, "object": "model", "created": facts.loaded_at, "owned_by": "ktransformer2"}
    meta = {"n_ctx": facts.context_tokens, "kv": facts.kv_form, "block_tokens": facts.block_tokens}
    return named | {"root": service.names[0], "max_model_len": facts.context_tokens, "meta": meta}


def _add_generation(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, caller: Caller, body: Body, call: Call) -> Response:
        stream = await service.begin(caller, await call.works(), body.cache_salt)
        if body.stream:
            return EventStream(call.events(stream), stream, service.limits.request_s)
        try:
            async with asyncio.timeout(service.limits.request_s):
                await unless_gone(request, stream.finish())
        except KTransformerError as error:
            raise failure(error) from error
        finally:
            stream.close()
        return AsciiJson(call.result(stream))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request, caller: Asking) -> Response:
        service.check_model(body.model)
        return await answer(request, caller, body, CompletionCall(service, body))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request, caller: Asking) -> Response:
        service.check_model(body.model)
        return await answer(request, caller, body, ChatCall(service, body))

    kept = Conversations(service.limits.stored_tokens)

    @app.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request, caller: Asking) -> Response:
        service.check_model(body.model)
        return await answer(request, caller, body, ResponsesCall(service, body, kept, caller))

    @app.get("/v1/responses/{response_id}")
    async def response(response_id: str, caller: Asking) -> dict[str, Any]:
        return kept.find(response_id, caller.name).response

    @app.delete("/v1/responses/{response_id}")
    async def forget(response_id: str, caller: Asking) -> dict[str, Any]:
        kept.forget(response_id, caller.name)
        return {"id": response_id, "object": "response", "deleted": True}


def _add_tokens(app: FastAPI, service: Service) -> None:
    most_bytes = service.limits.schema_bytes

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        given = [part for part in (body.content, body.prompt, body.messages) if part is not None]
        if len(given) != 1:
            raise ApiError(400, "give one of content, prompt and messages", "invalid_request", param="content")
        prompts = service.prompts
        text = body.content if body.prompt is None else body.prompt
        if text is None:
            said, template = for_template(service, body.messages or [], Tools.of(body.tools, None, most_bytes))
            ids = await prompts.chat(said, **template)
        else:
            ids = await prompts.encode(text)
        named = {"tokens": ids, "count": len(ids), "max_model_len": service.facts.context_tokens}
        return named | ({"pieces": await prompts.pieces(ids)} if body.with_pieces else {})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        if not all(0 <= token < 2**31 for token in body.tokens):
            raise ApiError(400, "a token id is 0 to 2^31 - 1", "invalid_request", param="tokens")
        text = await service.prompts.decode(body.tokens)
        return {"content": text, "prompt": text}

    @app.post("/apply-template")
    async def apply_template(body: TemplateBody) -> dict[str, str]:
        said, template = for_template(service, body.messages, Tools.of(body.tools, None, most_bytes))
        return {"prompt": await service.prompts.render(said, **template)}


def _add_cache(app: FastAPI, door: CacheDoor) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return _as_is(door.figures("/metrics", request.headers.get("accept", "")))

    @app.get("/v1/cache/stats")
    async def stats() -> Response:
        return _as_is(door.figures("/v1/cache/stats", ""))

    @app.get("/v1/cache/ls")  # as the monitor's server names it, for `ktransformer cache ls`
    @app.get("/v1/cache/entries")
    async def entries(caller: Asking, start: int = 0, limit: int = 100) -> dict[str, Any]:
        return await door.entries(caller, start, limit)

    @app.post("/v1/cache/explain")
    async def explain(body: PromptBody, caller: Asking) -> dict[str, Any]:
        return await door.explain(caller, body)

    @app.get("/v1/cache/pins")
    async def pins(caller: Asking) -> dict[str, Any]:
        return door.pins(caller)

    @app.post("/v1/cache/pin")
    async def pin(body: PromptBody, caller: Asking) -> dict[str, Any]:
        return await door.pin(caller, body)

    @app.delete("/v1/cache/pin/{name}")
    async def unpin(name: str, caller: Asking) -> dict[str, Any]:
        return await door.unpin(caller, name)


def _as_is(response: HttpResponse) -> Response:
    return Response(response.body, response.status, media_type=response.content_type)


def _add_error_bodies(app: FastAPI) -> None:
    async def told(_: Request, error: Exception) -> Response:
        problem = refusal(error)
        return AsciiJson(problem.body, problem.status, problem.headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), error
        first = error.errors()[0]
        # Of a body that is no JSON it is a number of characters, which nobody named.
        place = "" if first["type"] == "json_invalid" else ".".join(str(part) for part in first["loc"][1:])
        message = f"{place}: {first['msg']}" if place else str(first["msg"])
        return await told(request, ApiError(400, message, "invalid_request", param=place or None))

    async def http(request: Request, error: Exception) -> Response:
        if isinstance(error.__cause__, ApiError):  # raised by the gate while the body was read
            return await told(request, error.__cause__)
        assert isinstance(error, HTTPException), error
        where = f"{request.method} {request.url.path[:200]}"
        messages = {404: f"nothing is at {where}; see /openapi.json", 405: f"{where} is not how this is asked"}
        codes = {404: "not_found", 405: "method_not_allowed"}
        message, code = (
            messages.get(error.status_code, str(error.detail)),
            codes.get(error.status_code, "invalid_request"),
        )
        return await told(request, ApiError(error.status_code, message, code))

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (ApiError, KTransformerError, TimeoutError, Exception):
        app.add_exception_handler(kind, told)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, unless the client hangs up before. Raises: ApiError 499; what `work` does."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "the client has gone", "client_gone")
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
