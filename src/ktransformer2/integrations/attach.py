"""`attach(model)`: plain `generate`, pipelines and chat templates, with a cache that finds every prefix again.

    with ktransformer2.attach(model, memory="8GB"):
        model.generate(**inputs)

Here `generate` gets a cache of ours where a call leaves it a choice; a `PromptHook` watches the model's own calls for
their tokens. Another prompt is never answered with an old prefix: blocks are found by the hash of all tokens so far,
and by nothing else.

Knows no page. Invariants: outside `generate` the model is as it came; one call at a time, others wait; what it does not
understand (embeddings, images, other people's caches, `use_cache=False`) runs as without it, and is counted.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.stats import CacheStats
from ktransformer2.config import CacheConfig, EngineConfig, TierConfig, parse_bytes
from ktransformer2.engine.knobs import persistence, sorted_knobs
from ktransformer2.engine.memory_budget import Memory, auto_memory_bytes, most_useful_bytes, workspace_bytes
from ktransformer2.errors import ConfigError, EngineClosedError, UnsupportedModelError
from ktransformer2.integrations import generate_call as call
from ktransformer2.integrations.batch_rows import BatchRows
from ktransformer2.integrations.prompt_hook import CallUsage, PromptHook, RunningCall
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.hf import HFModel, cache_keyword
from ktransformer2.models.model_state import model_state
from ktransformer2.models.probe import text_config
from ktransformer2.models.registry import quiet_transformers
from ktransformer2.tiers.opening import asks_for_tiers, open_tiers, outlives_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Attachment", "CallUsage", "attach"]

_WHOLE_PROMPT = 2**31 - 1  # as prefill_chunk_size: prompts are read in chunks here
_attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def attach(
    model: PreTrainedModel,
    *,
    kv: str = "auto",
    memory: str | int = "auto",
    persist: bool | str | Path = "auto",
    **knobs: Any,
) -> Attachment:
    """From now on `model.generate` uses a cache that outlives the call, until `detach()` or the end of a `with`.

    `kv`: auto, full or int8, the form of full blocks. `memory`: the hard limit, such as "8GB"; auto: 0.8 x what the
    machine has free. `persist`: keep what was read on disk, so that the next process finds it: True, or the directory
    where. Off unless asked for ("auto"): the files tell what prompts said to whoever may read them, and all weights
    are hashed first. See docs/tiers.md. `knobs`: any other field of CacheConfig and TierConfig.

    What was read with other weights, buffers, hooks or PEFT adapters is not found: every call looks at them. It looks
    at 64 bytes of a tensor, which a write to a few others through `.data` leaves as they were, and not into a hook
    or a module of your own, whose numbers may change while it stays: call `clear()` after such a change.
    Raises: ConfigError, OutOfMemoryError, UnsupportedModelError for a model that cannot be served exactly; the model
    is as it was then.
    """
    return Attachment(model, memory, {"kv": kv, **persistence(persist), **knobs})


class Attachment:
    """A model's cache while it is attached. `cache.stats()` has the figures; `usage` those of the last call."""

    def __init__(self, model: PreTrainedModel, memory: str | int, knobs: Mapping[str, Any]) -> None:
        if model in _attached:
            raise ConfigError("the model has a cache attached already; detach() it before another one is attached")
        values, of_tiers = sorted_knobs(knobs, (CacheConfig, TierConfig))
        if memory != "auto":
            values["memory_bytes"] = parse_bytes(memory)
        tiers = TierConfig.load(of_tiers)
        CacheConfig.load(values)  # a wrong knob is told before the model is looked at
        lasts = outlives_process(tiers)
        with _left_as_it_was(model):
            self._model = _taken_in(model, lasts)
            if memory == "auto":
                values["memory_bytes"] = _auto_bytes(self._model, tiers.host_bytes)
            fingerprint = self._model.lasting_fingerprint() if lasts else self._model.fingerprint
            self.cache = KVCache(self._model.geometry, CacheConfig.load(values), fingerprint)
            try:
                self._hands_its_rows_over()
                if asks_for_tiers(tiers):
                    self.cache.join(open_tiers(tiers, self.cache.lineage), tiers)
                    self.cache.hand_over()
            except BaseException:
                self.cache.close()
                raise
        self.num_calls = self.num_plain_calls = 0  # plain: run as without this cache
        self._lock = threading.RLock()
        self._left: list[BlockTable] = []  # tables of caches that callers were given and hold no more
        self._prompts = PromptHook(self._model, self.cache)
        self._dtype = model.dtype
        self._closed = False
        self._generate: Any = model.generate
        self._own_generate: Any = model.__dict__.get("generate")
        self._hook = model.register_forward_pre_hook(_OfOneModel(self._prompts, _nothing), with_kwargs=True)
        self._first_state, self._this_process = model_state(model, self._hook.id), os.urandom(16)
        model.generate = _OfOneModel(self._cached_generate, self._generate)  # type: ignore[assignment]
        _attached.add(model)
        # A program's end is an orderly one too, where there is something to keep.
        self._end = weakref.finalize(self, _end, self.cache, os.getpid()) if asks_for_tiers(tiers) else None

    @property
    def model(self) -> PreTrainedModel:
        """The model, with its own attention outside `generate`."""
        return self._model.model

    @property
    def usage(self) -> CallUsage:
        """What the last call read; (0, 0) of one that ran as without the cache."""
        return self._prompts.usage

    def stats(self) -> CacheStats:
        """One frozen snapshot of the cache's figures."""
        return self.cache.stats()

    def clear(self) -> int:
        """Forget all prefixes and give their memory back; bytes given back.

        What lies in tiers stays there, and is not found by this attachment any more.
        """
        with self._lock:
            if self._end is not None:  # what it reads from now on is of this process alone
                self._first_state, self._this_process = b"", os.urandom(16)
            BatchRows(self.cache, left=self._left).release_left()
            freed = self.cache.clear()
            self.cache.hand_over()
            return freed

    def detach(self) -> None:
        """The model is as it came, and all memory goes back. A second call does nothing.

        With `persist` what was read is written first, for at most `flush_s`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._hook.remove()
            model = self._model.model
            del model.generate
            if self._own_generate is not None:
                model.generate = self._own_generate
            _attached.discard(model)
            self.cache.close()
            if self._end is not None:
                self._end.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    # --- generate

    def _cached_generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate`, with this cache where the call leaves it a choice."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the cache was detached while this call waited for it; call generate() again")
            values, model, outer = call.named(self._generate, args, kwargs), self._model.model, self._prompts.running
            if model.dtype != self._dtype:
                raise ConfigError(f"the model is {model.dtype} now, it was attached in {self._dtype}; attach it again")
            given = call.given_cache(values)
            ours = given if isinstance(given, DynamicKVCache) and given.kv is self.cache else None
            plain = outer is not None or (given is not None and ours is None) or not call.leaves_choice(model, values)
            if outer is None or not outer.plain:  # what a plain call calls is its own affair
                self.num_calls += 1
                self.num_plain_calls += plain
            self._prompts.running = RunningCall(plain, not plain and call.drafts(model, values))
            try:
                return self._run_plain(values, outer) if plain else self._run(ours, values)
            finally:
                self._prompts.running = outer

    def _run_plain(self, values: dict[str, Any], outer: RunningCall | None) -> Any:
        """As without this cache; `outer`: the call that this one was made in, whose attention is the registered one."""
        if outer is None:
            self._prompts.usage = CallUsage(0, 0)
        reads_pages = outer is None and isinstance(call.given_cache(values), DynamicKVCache)
        with nullcontext() if reads_pages else self._model.plain_attention():
            return self._generate(**values)

    def _run(self, given: DynamicKVCache | None, values: dict[str, Any]) -> Any:
        """`given`: a cache of ours that the caller holds; it is the caller's afterwards too, whatever happens."""
        model = self._model.model
        cache = given if given is not None else self._new_cache()
        others = {name: value for name, value in values.items() if name not in call.CACHE_NAMES}
        if call.setting(model, values, "prefill_chunk_size") is not None:
            others = call.with_setting(others, "prefill_chunk_size", _WHOLE_PROMPT)
        self._prompts.usage = CallUsage(0, 0)
        handed_out = given is not None
        try:
            if given is not None:
                self._go_back(given, values)
            with self._model.registered_attention():
                result = self._generate(**others, **{cache_keyword(model): cache})
            handed_out |= any(getattr(result, name, None) is cache for name in call.CACHE_NAMES)
        finally:
            if handed_out:
                cache.abandon()  # only where a pass broke off is there anything to forget
            else:
                cache.reset()
        return result

    def _new_cache(self) -> DynamicKVCache:
        return DynamicKVCache.over(self._model.model.config, BatchRows(self.cache, self._salt(), self._left))

    def _go_back(self, cache: DynamicKVCache, values: Mapping[str, Any]) -> None:
        """A caller's cache goes on with its own tokens only; else its blocks are found again as far as they fit."""
        prompt = call.prompt_of(values)
        if prompt is None:  # only new tokens were brought
            return
        rows, salt = cache.rows, self._salt()
        assert rows is not None, "a cache over this one has rows"
        copied = call.copies(self._model.model, values) > 1
        if copied or rows.salt != salt or not rows.are_the_start_of(*prompt):
            cache.reset()
            rows.salt = salt

    def _salt(self) -> bytes:
        """Other weights or hooks, another salt: what they computed is not found by these.

        The model as it was attached is named by the fingerprint, in every process; a state of it in this one alone.
        """
        state = model_state(self._model.model, self._hook.id)
        return b"" if state == self._first_state else self._this_process + state

    def _hands_its_rows_over(self) -> None:
        """One token, to see that the model gives the cache's rows to its attention as they are."""
        rows = BatchRows(self.cache)
        cache = DynamicKVCache.over(self._model.model.config, rows)
        with torch.inference_mode(), self._model.registered_attention():
            self._model.model(input_ids=torch.tensor([[0]]), **{cache_keyword(self._model.model): cache})
        cache.reset()
        self.cache.clear()
        self.cache.hand_over()


def _end(cache: KVCache, process: int) -> None:
    """The end of a cache that nobody detached; a fork's child has a copy, and nothing to write."""
    if os.getpid() == process:
        cache.close()


class _OfOneModel:
    """A method of an attachment, as an attribute of its model. In a copy of the model stands what was there before."""

    def __init__(self, method: Callable[..., Any], before: Any) -> None:
        self._method, self._before = method, before
        functools.update_wrapper(self, before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._before, memo)


def _nothing(*_: Any) -> None:
    """A hook that changes nothing."""


@contextmanager
def _left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Whatever happens inside, the model has its attention and its training mode back afterwards."""
    attention: str = text_config(model.config)._attn_implementation
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        with quiet_transformers():
            model.set_attn_implementation(attention)
        for module in training:
            module.training = True


def _taken_in(model: PreTrainedModel, lasts: bool) -> HFModel:
    if model.device.type != "cpu":
        raise UnsupportedModelError(
            f"the model lies on {model.device}; this version caches in host memory: use model.cpu()"
        )
    # Where its blocks never leave the process any name will do for its weights, and costs no hashing.
    return HFModel(model, weights_hash=None if lasts else os.urandom(32))


def _auto_bytes(model: HFModel, host_bytes: int) -> int:
    engine = EngineConfig()
    workspace = workspace_bytes(ModelFootprint.of(model), engine)
    left = Memory.measure().less(host_bytes)
    return auto_memory_bytes(left, 0, workspace, most_useful_bytes(model.geometry, engine))
