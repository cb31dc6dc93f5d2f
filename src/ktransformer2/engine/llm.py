"""`LLM`: a model, its cache and an engine behind one name, for people and scripts. Synchronous; one thread owns it.

    from ktransformer2 import LLM
    for chunk in LLM("some/model").stream("Once upon a time"):
        print(chunk.text, end="", flush=True)

Knows no step and no block. Invariant: a stream that is closed early, or an error on the way, leaves no request behind.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, EngineConfig, TierConfig, parse_bytes
from ktransformer2.engine.detokenizer import Tokenizer, Vocabulary
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.knobs import persistence, sorted_knobs
from ktransformer2.engine.memory_budget import Memory, auto_memory_bytes, most_useful_bytes, workspace_bytes
from ktransformer2.engine.outputs import EngineStats, RequestOutput, StreamChunk
from ktransformer2.engine.prompts import Message, Prompt, encoded, templated
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import ConfigError, EmptyPromptError, OwnershipError, RequestError
from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.loading import LoadedModel, load_model
from ktransformer2.tiers.opening import asks_for_tiers, open_tiers, outlives_process

_log = logging.getLogger(__name__)


class LLM:
    """A language model that answers prompts, and remembers what it has read."""

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        kv: str = "auto",
        memory: str | int = "auto",
        dtype: str = "auto",
        runner: str = "auto",
        weights: str = "dense",
        block_tokens: int = 64,
        persist: bool | str | Path = "auto",
        **config: Any,
    ) -> None:
        """Load `model` (a folder, a file, a hub id, or a model that is loaded already) and make its cache.

        `kv`: form of full blocks, auto, full or int8.
        `memory`: the cache's hard limit, such as "4GB", or bytes; auto: 0.8 x what weights and workspace leave.
        `dtype`: what the model computes in, such as "float32".
        `runner`: whose forward pass a step is: lean, transformers, or auto (lean where the model fits exactly).
        `weights`: the form in which they stay in memory: dense (tensors in `dtype`), auto (the codes of a quantised
        GGUF file as they are, else dense), or packed as bf16, int8 or int4 for the lean runner. See docs/weights.md.
        `block_tokens`: tokens of one block, the unit of sharing: 16, 32, 64, 128 or 256.
        `persist`: keep what was read on disk, so that the next process need not read it again: True, or the directory
        where. Nothing is written to disk unless asked for ("auto"): the files tell what prompts said to whoever may
        read them, and a library does not write that somewhere by itself. False: to no `valkey_url` either. See
        docs/tiers.md. Adapters and weights that were changed since `model` was loaded are noticed here, and what was
        read with others is not found; change none while this is open.
        `config`: any other field of CacheConfig, EngineConfig and TierConfig.
        Raises: ConfigError, ModelError, OutOfMemoryError.
        """
        if not isinstance(model, str | Path | LoadedModel):
            raise ConfigError(
                f"LLM({type(model).__name__}) is not understood; give a folder, a file, a hub id or what load_model() "
                "returned. A model of transformers keeps its own generate(): ktransformer2.attach(model)"
            )
        settings = {"kv": kv, "block_tokens": block_tokens, **persistence(persist), **config}
        cache_config, self.engine_config, self.tier_config = _configs(memory, settings)
        before = Memory.measure()
        if isinstance(model, LoadedModel):
            if runner not in ("auto", model.model.runner):
                raise ConfigError(
                    f"runner={runner!r} comes too late: the model was loaded for {model.model.runner!r}; "
                    f"give it to load_model(..., runner={runner!r})"
                )
            if weights not in ("dense", "auto", model.model.weights):
                raise ConfigError(
                    f"weights={weights!r} comes too late: the model was loaded with {model.model.weights!r}; "
                    f"give it to load_model(..., weights={weights!r})"
                )
            loaded = dataclasses.replace(model, model=model.model.up_to_date())
            # What it takes is taken already, and is taken off again below.
            there = loaded.model.weight_bytes + ModelFootprint.of(loaded.model).vocabulary_bytes
            before = dataclasses.replace(before, available_bytes=before.available_bytes + there)
        else:
            loaded = load_model(model, dtype=dtype, runner=runner, weights=weights)
        if memory == "auto":
            left = before.less(self.tier_config.host_bytes)
            cache_config = dataclasses.replace(cache_config, memory_bytes=_auto_bytes(left, loaded, self.engine_config))
        self.source, self.runner, self.weights = loaded.source, loaded.model.runner, loaded.model.weights
        self.tokenizer: Tokenizer = loaded.tokenizer
        lasts = outlives_process(self.tier_config)
        fingerprint = loaded.model.lasting_fingerprint() if lasts else loaded.model.fingerprint
        self.cache = KVCache(loaded.model.geometry, cache_config, fingerprint)
        vocabulary = Vocabulary(self.tokenizer, _end_tokens(loaded))
        self.engine = Engine(loaded.model, self.cache, vocabulary, self.engine_config)
        self._end = self._join_tiers()
        self._news: dict[str, deque[StreamChunk]] = {}  # chunks of requests that somebody reads
        self._closed = False

    # --- answers

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer one prompt or several (text or token ids), batched; outputs in the order of the prompts.

        `params`: one for all, or one for each. A request that fails while it runs has `output.error`; the others go on.
        Raises: what `Engine.add` raises for any of the prompts, before the first one is started.
        """
        if not prompts:
            raise EmptyPromptError("the prompt is empty; give a text, a list of token ids, or a list of prompts")
        prompt_ids = [encoded(self.tokenizer, prompt) for prompt in _as_prompts(prompts)]
        each = _params_for_each(params, len(prompt_ids))
        for ids, own in zip(prompt_ids, each, strict=True):
            self.engine.check(ids, own)
        return self._run(deque(zip(prompt_ids, each, strict=True)))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamChunk, None, None]:
        """Answer one prompt piece by piece: progress while the prompt is read, then text. The last chunk has `output`.

        Closing the iterator cancels the request. Several streams may be read in turns.
        Raises: what `Engine.add` raises, at once; while it runs, the error that ended the request.
        """
        prompt_ids = encoded(self.tokenizer, prompt)
        self.engine.check(prompt_ids, params)
        return self._stream(prompt_ids, params)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation of {"role": ..., "content": ...} messages in the model's own chat format.

        Raises: RequestError when the model has no chat template or it does not take the messages; else as `generate`.
        """
        return self.generate([templated(self.tokenizer, messages, self.source)], params)[0]

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        """`chat`, piece by piece, as `stream` does it."""
        return self.stream(templated(self.tokenizer, messages, self.source), params)

    def maintain(self) -> None:
        """Call this now and then while nothing is asked: nothing else runs then, so nothing else gives memory back.

        Frees what nobody used for `cached_idle_s` and returns its memory to the system. Cost: well below a millisecond
        when there is nothing to do. To give all of it back at once: `llm.cache.clear()`.
        """
        self.engine.maintain()

    def stats(self) -> EngineStats:
        """The counters of all requests so far, as they are now."""
        return self.engine.stats()

    # --- the end

    def close(self) -> None:
        """Cancel what runs, write what is to last (at most `flush_s` long), give all memory back. Twice is once."""
        if self._closed:
            return
        self.engine.close()
        self.cache.close()
        if self._end is not None:
            self._end.detach()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _join_tiers(self) -> weakref.finalize[..., LLM] | None:
        """What lies below the device, where it is asked for; then an end without `close` is an orderly one too."""
        if not asks_for_tiers(self.tier_config):
            return None
        try:
            self.cache.join(open_tiers(self.tier_config, self.cache.lineage), self.tier_config)
        except BaseException:
            self.cache.close()
            raise
        return weakref.finalize(self, _end, self.engine, self.cache, os.getpid())

    def _run(self, waiting: deque[tuple[list[int], SamplingParams | None]]) -> list[RequestOutput]:
        """All of `waiting`, added as the queue has places."""
        outputs: dict[str, RequestOutput | None] = {}  # in the order of the prompts
        try:
            while waiting or None in outputs.values():
                while waiting and self.engine.has_queue_room:
                    outputs[self.engine.add(*waiting.popleft())] = None
                for chunk in self._step():
                    if chunk.output is not None and chunk.request_id in outputs:
                        outputs[chunk.request_id] = chunk.output
        except BaseException:
            for request_id in outputs:
                self.engine.cancel(request_id)
            raise
        return [output for output in outputs.values() if output is not None]

    def _stream(self, prompt_ids: list[int], params: SamplingParams | None) -> Generator[StreamChunk, None, None]:
        request_id = self.engine.add(prompt_ids, params)
        news = self._news[request_id] = deque()
        try:
            while True:
                while not news:
                    self._step()
                chunk = news.popleft()
                if chunk.output is not None and chunk.output.error is not None:
                    raise chunk.output.error
                yield chunk
                if chunk.output is not None:
                    return
        finally:
            self._forget(request_id)

    def _step(self) -> list[StreamChunk]:
        """One step of the engine; its news also go to streams that wait in the middle."""
        chunks = self.engine.step()
        for chunk in chunks:
            if chunk.request_id in self._news:
                self._news[chunk.request_id].append(chunk)
        return chunks

    def _forget(self, request_id: str) -> None:
        """Nobody reads this request any more: if it still runs, it is cancelled."""
        del self._news[request_id]
        if not self._closed:
            self.engine.cancel(request_id)


def _configs(memory: str | int, values: dict[str, Any]) -> tuple[CacheConfig, EngineConfig, TierConfig]:
    """Every setting to the config that has it. Raises ConfigError for one that none has."""
    of_cache, of_engine, of_tiers = sorted_knobs(values, (CacheConfig, EngineConfig, TierConfig))
    if memory != "auto":
        of_cache["memory_bytes"] = parse_bytes(memory)
    return CacheConfig.load(of_cache), EngineConfig.load(of_engine), TierConfig.load(of_tiers)


def _end(engine: Engine, cache: KVCache, process: int) -> None:
    """What `close` does, for an `LLM` that nobody closed: it is dropped, or the process ends."""
    if os.getpid() != process:
        return  # a fork's child has a copy, and nothing to write
    try:
        engine.close()
    except OwnershipError:  # another thread's requests: what is full is kept all the same
        _log.warning("a model was dropped while another thread used it; its running requests are lost")
    cache.close()


def _auto_bytes(before: Memory, loaded: LoadedModel, config: EngineConfig) -> int:
    model = loaded.model
    workspace = workspace_bytes(ModelFootprint.of(model), config)
    return auto_memory_bytes(before, model.weight_bytes, workspace, most_useful_bytes(model.geometry, config))


def _end_tokens(loaded: LoadedModel) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's, and those the model's generation config adds."""
    generation = getattr(getattr(loaded.model, "model", None), "generation_config", None)
    ends: set[int] = set()
    for source in (loaded.tokenizer, generation):
        named = getattr(source, "eos_token_id", None)
        ends.update([named] if isinstance(named, int) else named or [])
    return frozenset(ends)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[item for item in prompts if isinstance(item, int)]]
    mixed = [item for item in prompts if isinstance(item, int)]
    if mixed:
        raise RequestError(
            f"prompts mix token ids and prompts ({mixed[0]!r}); give one list of ids, or a list of prompts"
        )
    return [item for item in prompts if not isinstance(item, int)]


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(
            f"{len(params)} sampling parameters for {num_prompts} prompts; give one for all, or one for each"
        )
    return list(params)
