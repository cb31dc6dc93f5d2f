"""From what people write to token ids: a text, ids, or the messages of a conversation. Knows no request and no engine.

Invariant: the ids come straight from the tokenizer and its chat template; a rendered text is never read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktransformer2.engine.detokenizer import Tokenizer
from ktransformer2.errors import EmptyPromptError, RequestError

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


def encoded(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The ids of a text, with the special tokens that the model begins with; ids as they are.

    Raises: EmptyPromptError, RequestError.
    """
    if not isinstance(prompt, str):
        return list(prompt)
    if not prompt:
        raise EmptyPromptError("the prompt is empty; it must hold at least one character")
    _check_text(prompt)
    return tokenizer.encode(prompt)


def templated(tokenizer: Tokenizer, messages: Sequence[Message], source: object, **template: Any) -> list[int]:
    """The ids of a conversation in the model's own chat format, up to where the answer begins.

    `source` names the model in a message; `template` goes to the chat template, such as `tools`.
    Raises: EmptyPromptError; RequestError when there is no template or it does not take the messages.
    """
    return list(_rendered(tokenizer, messages, source, tokenize=True, return_dict=False, **template))


def templated_text(tokenizer: Tokenizer, messages: Sequence[Message], source: object, **template: Any) -> str:
    """`templated`, as the text that the ids are of."""
    return str(_rendered(tokenizer, messages, source, tokenize=False, **template))


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message], source: object, **options: Any) -> Any:
    if not messages:
        raise EmptyPromptError("the conversation is empty; it must hold at least one message")
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(f"a message is a mapping with a role and a content; got {message!r}")
        if isinstance(content := message.get("content"), str):
            _check_text(content)
    if messages[-1].get("role") != "tool" and _says_nothing(messages[-1].get("content")):  # a tool may find nothing
        raise EmptyPromptError("the last message is empty; its content must hold at least one character")
    if not tokenizer.chat_template:
        raise RequestError(
            f"the tokenizer of {source} has no chat template; use generate() or stream() with a plain prompt, "
            "or a model that is made for chat"
        )
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, **options
        )
    except Exception as error:  # a template is a program of the model's author; what it raises is not known here
        raise RequestError(
            f"the chat template of {source} does not take these messages ({error}); each needs a role that "
            "the model knows, such as user, and a content"
        ) from error


def _check_text(text: str) -> None:
    """Raises RequestError for half characters (surrogates), which come from bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds {text[error.start : error.start + 1]!r} at place {error.start}, which is no character; "
            "decode its bytes as UTF-8"
        ) from error


def _says_nothing(content: object) -> bool:
    """Whether a message's content is empty text, or parts of it. None is no text: such a message may call a tool."""
    if isinstance(content, list | tuple):
        return all(isinstance(part, Mapping) and _says_nothing(part.get("text")) for part in content)
    return isinstance(content, str) and not content.strip()
