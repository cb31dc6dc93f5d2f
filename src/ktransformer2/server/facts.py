"""What a served model is, once it is loaded: plain values and pure functions, for any thread. Knows no request."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.sizing import sealed_form
from ktransformer2.engine.detokenizer import Tokenizer
from ktransformer2.engine.llm import LLM


@dataclass(frozen=True)
class Facts:
    """`context_tokens`: prompt and answer together, as model and memory allow. `tokenizer` is a copy of the engine's.

    `kv_bytes`: the most bytes of cache that so many tokens need. `cache` is for what any thread may ask of it.
    """

    loaded_at: int
    context_tokens: int
    block_tokens: int
    kv_form: str
    max_new_tokens: int
    end_tokens: frozenset[int]
    tokenizer: Tokenizer
    kv_bytes: Callable[[int], int]
    cache: KVCache

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """For the owner of the cache to call."""
        chunk = llm.engine_config.max_step_tokens
        cache = llm.cache
        return cls(
            loaded_at=int(time.time()),
            context_tokens=min(cache.geometry.max_positions, cache.capacity_tokens(chunk)),
            block_tokens=cache.config.block_tokens,
            kv_form=sealed_form(cache.geometry, cache.config).name.lower(),
            max_new_tokens=llm.engine_config.max_new_tokens,
            end_tokens=llm.engine.vocabulary.end_tokens,
            tokenizer=copy.deepcopy(llm.tokenizer),
            kv_bytes=lambda num_tokens: cache.bytes_for(num_tokens, chunk),
            cache=cache,
        )
