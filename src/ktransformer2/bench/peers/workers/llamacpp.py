"""llama.cpp through the C interface that `llama-cpp-python` wraps, so that nothing of Python's lies between two tokens.

The KV cache is f16 with flash attention, which is its best: q8_0 slows its prefill two- to threefold.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import llama_cpp
import numpy as np


class Peer:
    def __init__(self, model: str, threads: int, max_tokens: int) -> None:
        llama_cpp.llama_backend_init()
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._max_tokens = max_tokens
        self._context = self._new_context(max_tokens, 1)
        self._ids: list[int] = []  # the last one is not in the cache yet

    def about(self) -> dict[str, Any]:
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "kv": "f16, flash attention",
            "built for": system,
        }

    def read(self, ids: Sequence[int], room: int, reuse: bool) -> dict[str, Any]:
        assert len(ids) + room <= self._max_tokens, (len(ids), room, self._max_tokens)
        began = time.perf_counter()
        kept = self._ids[:-1] if reuse else []
        reused = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept, ids[:-1], strict=False)))
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, reused, -1)
        self._read(self._context, ids[reused:], reused, 0)
        token = self._best(self._context, -1)
        first_s = time.perf_counter() - began
        self._ids = [*ids, token]
        return {"first_s": first_s, "token": token, "reused": reused}

    def step(self) -> list[int]:
        self._read(self._context, self._ids[-1:], len(self._ids) - 1, 0)
        self._ids.append(self._best(self._context, -1))
        return self._ids[-1:]

    def batch(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        """A context with a stream of its own for every prompt, made before the clock runs."""
        longest = max(map(len, prompts)) + count
        context = self._new_context(len(prompts) * longest, len(prompts))
        rows: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self._read(context, prompt, 0, number)
            rows[number].append(self._best(context, -1))
        for step in range(count - 1):
            last = [(row[-1], len(prompt) + step) for row, prompt in zip(rows, prompts, strict=True)]
            self._submit(context, [(token, at, number, True) for number, (token, at) in enumerate(last)])
            for number, row in enumerate(rows):
                row.append(self._best(context, number))
        seconds = time.perf_counter() - began
        llama_cpp.llama_free(context)
        return {"seconds": seconds, "tokens": rows}

    def save(self, path: str) -> dict[str, Any]:
        """The sequence and its token ids, in llama.cpp's own file."""
        kept = self._ids[:-1]
        tokens = (llama_cpp.llama_token * len(kept))(*kept)
        written = llama_cpp.llama_state_seq_save_file(self._context, path.encode(), 0, tokens, len(kept))
        if not written:
            raise RuntimeError(f"llama.cpp cannot save its state to {path}")
        return {"bytes": written, "num_tokens": len(kept)}

    def restore(self, path: str) -> dict[str, Any]:
        began = time.perf_counter()
        tokens = (llama_cpp.llama_token * self._max_tokens)()
        num_tokens = ctypes.c_size_t()
        found = llama_cpp.llama_state_seq_load_file(
            self._context, path.encode(), 0, tokens, self._max_tokens, ctypes.byref(num_tokens)
        )
        if not found:
            raise RuntimeError(f"llama.cpp cannot restore its state from {path}")
        self._ids = [*tokens[: num_tokens.value], -1]  # what came behind is not in the file
        return {"seconds": time.perf_counter() - began, "num_tokens": num_tokens.value}

    def _new_context(self, num_tokens: int, num_sequences: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._chunk_tokens = params.n_batch
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp has no room for {num_sequences} sequences of {num_tokens} tokens in all")
        return context

    def _read(self, context: Any, ids: Sequence[int], start: int, sequence: int) -> None:
        """Into the cache, in as large pieces as llama.cpp takes; logits for the last one only."""
        for begin in range(0, len(ids), self._chunk_tokens):
            piece = ids[begin : begin + self._chunk_tokens]
            is_last = begin + len(piece) == len(ids)
            rows = [
                (token, start + begin + i, sequence, is_last and i == len(piece) - 1) for i, token in enumerate(piece)
            ]
            self._submit(context, rows)

    def _submit(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        code = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def _best(self, context: Any, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
