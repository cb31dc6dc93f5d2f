"""A tokenizer whose tokens are single bytes: every character beyond ASCII is several tokens."""

from __future__ import annotations

from typing import Any

END = 256
SYSTEM, USER, ASSISTANT, TURN_END = 257, 258, 259, 260
VOCAB_SIZE = 262
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


class ByteTokenizer:
    """As `transformers` tokenizers: special tokens vanish in decoding, half a character is U+FFFD."""

    eos_token_id = END

    def __init__(self, chat_template: str | None = "roles") -> None:
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        assert skip_special_tokens
        return bytes(token for token in token_ids if token < END).decode(errors="replace")

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> list[int]:
        assert kwargs == {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
        ids: list[int] = []
        for message in conversation:
            ids += [_ROLES[message["role"]], *self.encode(message["content"]), TURN_END]
        return [*ids, ASSISTANT]
