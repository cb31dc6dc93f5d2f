"""vLLM's CPU build, its engine stepped in this process.

Prefixes are cached, and forgotten before a reading that must be cold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the peak would be that of a process that only waits
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import vllm


class Peer:
    def __init__(self, model: str, threads: int, dtype: str, max_tokens: int) -> None:
        import torch

        torch.set_num_threads(threads)
        arguments = vllm.EngineArgs(
            model=model, dtype=dtype, max_model_len=max_tokens, max_num_seqs=8, enable_prefix_caching=True
        )
        self._engine: Any = vllm.LLMEngine.from_engine_args(arguments)
        self._numbers = iter(range(1_000_000))
        self._request = ""
        self._num_tokens = 0  # of the running request's answer

    def about(self) -> dict[str, Any]:
        return {"version": f"vllm-cpu {vllm.__version__}"}

    def read(self, ids: Sequence[int], room: int, reuse: bool) -> dict[str, Any]:
        self._forget(reuse)
        began = time.perf_counter()
        self._request, self._num_tokens = self._add(ids, 1 + room), 0
        (token,) = self.step()
        return {"first_s": time.perf_counter() - began, "token": token}

    def batch(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        self._forget(reuse=False)
        began = time.perf_counter()
        names = [self._add(prompt, count) for prompt in prompts]
        found: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            found |= {output.request_id: list(output.outputs[0].token_ids) for output in self._engine.step()}
        return {"seconds": time.perf_counter() - began, "tokens": [found[name] for name in names]}

    def _add(self, ids: Sequence[int], count: int) -> str:
        name = str(next(self._numbers))
        params = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(ids)}, params)
        return name

    def step(self) -> list[int]:
        while True:
            for output in self._engine.step():
                tokens = output.outputs[0].token_ids
                if len(tokens) > self._num_tokens:
                    new = list(tokens[self._num_tokens :])
                    self._num_tokens = len(tokens)
                    return new

    def _forget(self, reuse: bool) -> None:
        if self._request and self._engine.has_unfinished_requests():
            self._engine.abort_request([self._request])
            self._engine.step()
        self._request = ""
        if not reuse:
            self._engine.reset_prefix_cache()
