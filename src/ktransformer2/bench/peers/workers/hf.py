"""transformers, unmodified, with its own caches and SDPA, in a loop of forward calls (`generate` adds its own start).

`way`: stock (DynamicCache, as `generate` does it), masked (DynamicCache and an explicit mask, which keeps SDPA off its
slow grouped path) or static (StaticCache, as long as the request).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache


class Peer:
    def __init__(self, model: str, threads: int, way: str, dtype: str) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), local_files_only=True
        )
        self._way = way
        self._cache: Any = None
        self._ids: list[int] = []  # the last one is not in the cache yet

    def about(self) -> dict[str, Any]:
        return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    def read(self, ids: Sequence[int], room: int, reuse: bool) -> dict[str, Any]:
        began = time.perf_counter()
        kept = self._ids[:-1] if reuse else []
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(kept, ids[:-1], strict=False))
        reused = sum(1 for _ in pairs)
        if not reused or self._way == "static":
            reused, self._cache = 0, self._new_cache(len(ids) + room)
        elif len(kept) > reused:
            self._cache.crop(reused - len(kept))  # negative: so many fewer
        token = self._forward(torch.tensor([ids[reused:]]), reused)[0]
        first_s = time.perf_counter() - began
        self._ids = [*ids, token]
        return {"first_s": first_s, "token": token, "reused": reused}

    def step(self) -> list[int]:
        new = self._forward(torch.tensor([self._ids[-1:]]), len(self._ids) - 1)
        self._ids += new
        return new

    def batch(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        """Prompts of one length: nothing is padded."""
        self._ids, self._cache = [], self._new_cache(len(prompts[0]) + count)
        began = time.perf_counter()
        columns = [self._forward(torch.tensor(prompts), 0)]
        for _ in range(count - 1):
            ids = torch.tensor(columns[-1]).unsqueeze(1)  # [prompts, 1]
            columns.append(self._forward(ids, len(prompts[0]) + len(columns) - 1))
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": [list(row) for row in zip(*columns, strict=True)]}

    def _new_cache(self, num_tokens: int) -> Any:
        config = self._model.config
        if self._way == "static":
            return StaticCache(config=config, max_cache_len=num_tokens)
        return DynamicCache(config=config)

    def _forward(self, ids: torch.Tensor, start: int) -> list[int]:
        """The next token of every row of `ids` [B, T], the first of which has position `start`."""
        given: dict[str, Any] = {}
        if self._way == "masked" and ids.shape[1] == 1:
            given["attention_mask"] = torch.zeros(len(ids), 1, 1, start + 1, dtype=self._model.dtype)
        positions = torch.arange(start, start + ids.shape[1]).unsqueeze(0)
        with torch.inference_mode():
            found = self._model(input_ids=ids, position_ids=positions, cache=self._cache, logits_to_keep=1, **given)
        tokens: list[int] = found.logits[:, -1].argmax(dim=-1).tolist()
        return tokens
