"""llama.cpp from `xllamacpp`'s wheel, through the server inside it: its own slots, its own clock.

The server tells text and counts, no ids (they are -1 here), so every decoding goes on from the prompt, which its slot
still holds. Seconds are the server's own, which count neither its queue nor JSON.
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
        self._ids = list(ids)
        timings = self._complete(1, reuse)
        seconds = (timings["prompt_ms"] + timings["predicted_ms"]) / 1000
        return {"first_s": seconds, "token": -1, "reused": len(ids) - timings["prompt_n"]}

    def decode(self, count: int) -> dict[str, Any]:
        """One token more than `count`: the clock of the answer starts behind its first."""
        timings = self._complete(1 + count, reuse=True)
        num_timed = timings["predicted_n"] - 1
        return {"seconds": [timings["predicted_ms"] / 1000 / num_timed] * num_timed, "tokens": [-1] * num_timed}

    def _complete(self, count: int, reuse: bool) -> dict[str, Any]:
        asked = {"prompt": self._ids, "n_predict": count, "cache_prompt": reuse, "temperature": 0, "ignore_eos": True}
        timings: dict[str, Any] = self._server.handle_completions(asked)["timings"]
        return timings
