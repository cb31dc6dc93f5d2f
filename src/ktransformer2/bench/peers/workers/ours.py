"""Ours, as a person gets it: `LLM` with its shipped defaults, but for what a contender names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ktransformer2 import LLM, SamplingParams, __version__
from ktransformer2.engine.outputs import StreamChunk


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


class Peer:
    def __init__(self, model: str, threads: int, **settings: Any) -> None:
        del threads  # torch has them from the environment, as it would in a person's hands
        self._llm = LLM(model, **settings)
        self._stream: Iterator[StreamChunk] = iter(())

    def about(self) -> dict[str, Any]:
        return {"version": f"ktransformer2 {__version__}", "kv": self._llm.cache.config.kv}

    def read(self, ids: Sequence[int], room: int, reuse: bool) -> dict[str, Any]:
        self._end()
        if not reuse:
            self._llm.cache.clear()
        began = time.perf_counter()
        self._stream = self._llm.stream(list(ids), _greedy(1 + room))
        (token,) = self.step()
        first_s = time.perf_counter() - began
        if not room:
            self._end()
        return {"first_s": first_s, "token": token}

    def batch(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        self._end()
        self._llm.cache.clear()
        began = time.perf_counter()
        outputs = self._llm.generate([list(prompt) for prompt in prompts], _greedy(count))
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": [list(output.token_ids) for output in outputs]}

    def step(self) -> list[int]:
        while not (chunk := next(self._stream)).token_ids:
            pass
        return list(chunk.token_ids)

    def _end(self) -> None:
        """The request before, if there is one, releases its blocks."""
        if hasattr(self._stream, "close"):
            self._stream.close()
