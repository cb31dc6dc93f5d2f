"""OpenVINO GenAI: its pipeline with continuous batching, which it runs text models with on a CPU, stepped by hand.

Nothing empties its prefix cache, so there are two pipelines, one at a time: without the cache for whatever must be
cold, with it for what goes on from a prefix. The change costs the reading of the prefix.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai


class Peer:
    def __init__(self, model: str, threads: int, kv: str) -> None:
        self._model, self._kv = model, kv
        self._settings = {
            "INFERENCE_NUM_THREADS": threads,
            "KV_CACHE_PRECISION": kv,
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._numbers = iter(range(1_000_000))
        self._pipeline: Any = None
        self._caches = False
        self._handle: Any = None
        self._open(caches=False)

    def about(self) -> dict[str, Any]:
        version = f"openvino-genai {openvino_genai.__version__}, openvino {openvino.__version__}"
        return {"version": version, "kv": self._kv}

    def read(self, ids: Sequence[int], room: int, reuse: bool) -> dict[str, Any]:
        self._end()
        self._open(caches=reuse)
        began = time.perf_counter()
        self._handle = self._add(ids, 1 + room)
        (token,) = self.step()
        return {"first_s": time.perf_counter() - began, "token": token}

    def batch(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        self._end()
        self._open(caches=False)
        began = time.perf_counter()
        handles = [self._add(prompt, count) for prompt in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": [list(handle.read_all()[0].generated_ids) for handle in handles]}

    def _open(self, caches: bool) -> None:
        if self._pipeline is not None and self._caches == caches:
            return
        self._pipeline = None
        gc.collect()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = self._caches = caches
        scheduler.cache_size = 1  # GB
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(self._model, scheduler, "CPU", self._settings)

    def _add(self, ids: Sequence[int], count: int) -> Any:
        config = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
        return self._pipeline.add_request(next(self._numbers), tensor, config)

    def step(self) -> list[int]:
        while not self._handle.can_read():
            self._pipeline.step()
        return [token for output in self._handle.read().values() for token in output.generated_ids]

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.stop()
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            self._handle = None
