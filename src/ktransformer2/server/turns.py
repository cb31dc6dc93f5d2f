"""The next turn of a conversation: messages, tools, a wanted format -> ids, a constraint, and how to read the answer.

What chats and responses have in common. Knows no route.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktransformer2.engine.sampler import Constraint
from ktransformer2.server.answer_reader import THINK, AnswerReader
from ktransformer2.server.conversations import Said
from ktransformer2.server.messages import flat
from ktransformer2.server.problems import ApiError
from ktransformer2.server.service import Service
from ktransformer2.server.tools import Tools, uses_tools, with_arguments

_TAIL_TOKENS = 8  # enough for a tag that a template ends the prompt with


@dataclass(frozen=True)
class Turn:
    """What is asked, and what reads each answer to it."""

    prompt_ids: list[int]
    constraint: Callable[[], Constraint] | None
    tools: Tools
    thinks: bool
    warnings: tuple[str, ...] = ()

    def reader(self) -> AnswerReader:
        forced = self.tools.forced
        return AnswerReader(thinks=self.thinks and not forced, tools=bool(self.tools.functions), forced=forced)


async def next_turn(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    schema: Mapping[str, Any] | None,
    before: Said | None = None,
) -> Turn:
    """`schema`: the answer's, if it is to be JSON; `before`: the turn that this one goes on from, if it was kept.

    Raises: RequestError, ApiError.
    """
    said, template = for_template(service, messages, tools)
    ids = await service.prompts.chat(said, **template)
    if before is not None:
        ids = await service.prompts.continued(ids, before)
    constraint = None
    if tools.forced or schema is not None:
        wanted = tools.schema if tools.forced else schema or {}
        if len(json.dumps(wanted)) > service.limits.schema_bytes:
            most = f"{service.limits.schema_bytes:,} bytes"
            raise ApiError(400, f"the schema is larger than {most}", "schema_too_large", param="response_format")
        constraint = await service.prompts.constraint(wanted)
    # A constrained answer begins with what is constrained, also where the prompt ends in an opened thought.
    thinks = constraint is None and (await service.prompts.decode(ids[-_TAIL_TOKENS:])).rstrip().endswith(THINK)
    twice = ("the prompt begins with two begin-of-text tokens; see /apply-template",)
    return Turn(ids, constraint, tools, thinks, twice if service.prompts.begins_twice(ids) else ())


def for_template(
    service: Service, messages: Sequence[Mapping[str, Any]], tools: Tools
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages as the chat template takes them, and what else it takes. Raises: ApiError."""
    said = with_arguments(flat(messages))
    if not (tools.functions or uses_tools(said)):
        return said, {}
    if "tools" in str(service.facts.tokenizer.chat_template):
        return said, {"tools": tools.for_template or None}
    return tools.in_words(said), {}


def wanted_schema(response_format: Any) -> Mapping[str, Any] | None:
    """Of `response_format`, or the flat `text.format` of responses; None: any text. Raises: ApiError."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = response_format.get("json_schema", response_format) if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ApiError(
            400,
            "a format is text, json_object, or json_schema with a schema",
            "invalid_request",
            param="response_format",
        )
    return schema
