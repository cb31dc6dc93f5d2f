"""llama.cpp from `xllamacpp`'s wheel, through the server inside it: its own slots, its own clock.

A request that repeats what was read goes on from there, so decoding a few tokens is a request for these. Seconds come
from the server's own timings, which count neither its queue nor JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import xllamacpp


class Peer:
    def __init__(self, model: str, threads: int, max_tokens: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx, params.n_parallel = max_tokens, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)
        self._ids: list[int] = []

    def about(self) -> dict[str, Any]:
        return {"version": f"xllamacpp {version('xllamacpp')}", "built for": xllamacpp.get_system_info()}

    def read(self, ids: Sequence[int], room: int, reuse: bool) -> dict[str, Any]:
        del room
        tokens, timings = self._complete(ids, 1, reuse)
        self._ids = [*ids, *tokens]
        seconds = (timings["prompt_ms"] + timings["predicted_ms"]) / 1000
        return {"first_s": seconds, "token": tokens[0], "reused": len(ids) - timings["prompt_n"]}

    def decode(self, count: int) -> dict[str, Any]:
        """One token more than `count`: the first comes with the end of the prompt, which is read anew."""
        tokens, timings = self._complete(self._ids, count + 1, reuse=True)
        self._ids += tokens
        return {"seconds": [timings["predicted_ms"] / 1000 / count] * count, "tokens": tokens[1:]}

    def _complete(self, ids: Sequence[int], count: int, reuse: bool) -> tuple[list[int], dict[str, Any]]:
        asked = {"prompt": list(ids), "n_predict": count, "cache_prompt": reuse, "temperature": 0, "ignore_eos": True}
        answer = self._server.handle_completions(asked | {"return_tokens": True})
        return answer["tokens"], answer["timings"]
