"""`attach(model)`: plain `generate`, pipelines and chat templates, with a cache that finds every prefix again.

    with ktransformer2.attach(model, memory="8GB"):
        model.generate(**inputs)

A transformers cache sees no token, so the model's calls are watched: before the first pass of a prompt its tokens are
looked up, what is missing is read in chunks, and the model computes the rest itself. Another prompt is never answered
with an old prefix: blocks are found by the hash of all tokens so far, and by nothing else.

Knows no page. Invariants: outside `generate` the model is as it came; one call at a time, others wait; what it does not
understand (embeddings, images, other people's caches, `use_cache=False`) runs as without it, and is counted.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.stats import CacheStats
from ktransformer2.config import CacheConfig, EngineConfig, parse_bytes
from ktransformer2.engine.memory_budget import Memory, auto_memory_bytes, most_useful_bytes, workspace_bytes
from ktransformer2.errors import ConfigError, EngineClosedError, OutOfMemoryError
from ktransformer2.integrations.batch_rows import BatchRows
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.models.batch import FlatBatch
from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.hf import HFModel, cache_keyword

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHE_NAMES = ("cache", "past_key_values")
# Tensors of a call that have one column per token; with any other the tokens do not say what the keys are.
_PER_TOKEN = ("input_ids", "position_ids", "cache_position")
_UNDERSTOOD = frozenset({*_PER_TOKEN, *_CACHE_NAMES, "attention_mask", "logits_to_keep"})
_attached: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class CallUsage:
    """What one `generate` read: tokens of all its rows, and how many of them were cached."""

    prompt_tokens: int
    cached_tokens: int


def attach(model: PreTrainedModel, *, kv: str = "auto", memory: str | int = "auto", **knobs: Any) -> Attachment:
    """From now on `model.generate` uses a cache that outlives the call, until `detach()` or the end of a `with`.

    `kv`: auto, full or int8, the form of full blocks. `memory`: the hard limit, such as "8GB"; auto: 0.8 x what the
    machine has free. `knobs`: any other field of CacheConfig.
    Raises: ConfigError, OutOfMemoryError, UnsupportedModelError for a model that cannot be served exactly.
    """
    return Attachment(model, kv, memory, knobs)


class Attachment:
    """A model's cache while it is attached. `cache.stats()` has the figures; `usage` those of the last call."""

    def __init__(self, model: PreTrainedModel, kv: str, memory: str | int, knobs: Mapping[str, Any]) -> None:
        if model in _attached:
            raise ConfigError("the model has a cache attached already; detach() it before another one is attached")
        values = {"kv": kv, **knobs}
        if memory != "auto":
            values["memory_bytes"] = parse_bytes(memory)
        config = CacheConfig.load(values)
        engine = EngineConfig()
        # The blocks of this cache never leave the process: any name will do for its weights, and costs no hashing.
        self._model = HFModel(model, weights_hash=os.urandom(32))
        self._model.restore()
        if memory == "auto":
            most = most_useful_bytes(self._model.geometry, engine)
            workspace = workspace_bytes(ModelFootprint.of(self._model), engine)
            config = CacheConfig.load(
                {**values, "memory_bytes": auto_memory_bytes(Memory.measure(), 0, workspace, most)}
            )
        self.cache = KVCache(self._model.geometry, config, self._model.fingerprint)
        self.usage = CallUsage(0, 0)
        self.num_calls = self.num_plain_calls = 0  # plain: run as without this cache
        self._chunk_tokens = engine.max_step_tokens
        self._lock = threading.RLock()
        self._lent: list[tuple[weakref.ref[DynamicKVCache], BatchRows]] = []  # caches that callers were given
        self._drafts = False  # the running call proposes several tokens at once
        self._closed = False
        self._generate: Any = model.generate
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.generate = self._cached_generate  # type: ignore[assignment]  # of this one object
        _attached[model] = self

    def stats(self) -> CacheStats:
        """One frozen snapshot of the cache's figures."""
        return self.cache.stats()

    def clear(self) -> int:
        """Forget all prefixes and give their memory back; bytes given back."""
        with self._lock:
            freed = self.cache.clear()
            self.cache.hand_over()
            return freed

    def detach(self) -> None:
        """The model is as it came, and all memory goes back. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._hook.remove()
            model = self._model.model
            del model.generate
            del _attached[model]
            self.cache.close()

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
            self.num_calls += 1
            given = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
            model = self._model.model
            ours = given if isinstance(given, DynamicKVCache) and given.kv is self.cache else None
            if ours is None and (given is not None or not _leaves_choice(model, kwargs)):
                self.num_plain_calls += 1
                return self._generate(*args, **kwargs)
            self._take_back()
            if ours is not None and _brings_everything(ours, args, kwargs):
                ours.reset()  # its blocks are found again as far as the prompt is the same
            return self._run(ours or DynamicKVCache.over(model.config, self.cache), args, kwargs)

    def _run(self, cache: DynamicKVCache, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        others = {name: value for name, value in kwargs.items() if name not in _CACHE_NAMES}
        self.usage = CallUsage(0, 0)
        self._drafts = any(kwargs.get(n) is not None for n in ("assistant_model", "prompt_lookup_num_tokens"))
        try:
            with self._model.registered_attention():
                result = self._generate(*args, **others, **{cache_keyword(self._model.model): cache})
        except BaseException:
            cache.reset()
            raise
        rows = cache.rows
        if any(getattr(result, name, None) is cache for name in _CACHE_NAMES) and rows is not None:
            self._lent.append((weakref.ref(cache), rows))
        elif all(kwargs.get(name) is not cache for name in _CACHE_NAMES):
            cache.reset()
        return result

    def _take_back(self) -> None:
        """Rows of caches that nobody has any more."""
        for reference, rows in self._lent:
            if reference() is None:
                rows.release()
        self._lent = [(reference, rows) for reference, rows in self._lent if reference() is not None]

    # --- the model's calls

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Tells the cache the tokens of a call, and takes off the call what the cache has or reads itself."""
        cache = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        if not isinstance(cache, DynamicKVCache) or cache.kv is not self.cache or args:
            return None
        ids = kwargs.get("input_ids")
        if ids is None or not _tokens_say_all(kwargs):
            return None
        if cache.batch_size < 0 and cache.is_paged:
            kwargs = self._reuse(cache, ids, kwargs)
        cache.tell(kwargs["input_ids"])
        return args, kwargs

    def _reuse(self, cache: DynamicKVCache, ids: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call without the columns that are read here; as it is where nothing can be taken off."""
        mask, head = kwargs.get("attention_mask"), ids.shape[1] - self._columns_kept(kwargs)
        if head <= 0 or (mask is not None and mask.shape != ids.shape):
            return kwargs
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(torch.bool)
        if not _positions_count(kwargs.get("position_ids"), real):
            return kwargs
        rows = cache.rows
        assert rows is not None, "a cache over this one has rows"
        prompts = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
        tables = self._read(prompts, [int(n) for n in real[:, :head].sum(dim=1)], rows.rollback_tokens)
        rows.adopt(tables, head, None if bool(real[:, :head].all()) else real[:, :head])
        self.cache.hand_over()
        cut = {name: kwargs[name][..., head:] for name in _PER_TOKEN if kwargs.get(name) is not None}
        return {**kwargs, **cut}

    def _columns_kept(self, kwargs: Mapping[str, Any]) -> int:
        """How many of the newest columns the model must compute itself: those whose logits are asked for."""
        wanted = kwargs.get("logits_to_keep")
        if isinstance(wanted, int) and wanted > 0:
            return wanted
        return 2**31 if self._drafts or wanted is not None else 1  # `generate` looks at the last one only

    # --- reading prompts

    def _read(self, prompts: Sequence[list[int]], lengths: Sequence[int], rollback_tokens: int) -> list[BlockTable]:
        """Tables that hold the first `lengths[i]` tokens of every prompt: found, forked from an equal row, or computed.

        Raises: OutOfMemoryError; nothing is held then.
        """
        tables: list[BlockTable] = []
        equal: dict[tuple[int, ...], BlockTable] = {}
        pack = _Pack(self)
        cached = 0
        try:
            for prompt, length in zip(prompts, lengths, strict=True):
                tokens = prompt[:length]
                twin = equal.get(tuple(tokens))
                if twin is not None:
                    pack.compute()
                    tables.append(self.cache.fork(twin))
                    cached += length
                    continue
                match = self.cache.match(prompt[: length + 1])
                if pack.would_repeat(match.num_tokens, tokens):
                    pack.compute()
                    match = self.cache.match(prompt[: length + 1])
                table = equal[tuple(tokens)] = self.cache.new_table()
                tables.append(table)
                table.rollback_tokens = rollback_tokens
                if not self.cache.allocate(table, 0, match):
                    raise self._no_room(lengths)
                cached += table.num_tokens
                pack.add(table, tokens)
            pack.compute()
        except BaseException:
            for table in tables:
                self.cache.release(table)
            self.cache.hand_over()
            raise
        self.usage = CallUsage(sum(map(len, prompts)), cached)
        return tables

    def _no_room(self, lengths: Sequence[int]) -> OutOfMemoryError:
        need = sum(self.cache.bytes_for(length, self._chunk_tokens) for length in lengths)
        have = self.cache.config.memory_bytes
        fits = self.cache.capacity_tokens(self._chunk_tokens)
        return OutOfMemoryError(
            f"prompts of {sum(lengths)} tokens in {len(lengths)} rows need {need / 1e6:.1f} MB and memory="
            f"{have / 1e6:.1f} MB is the limit: one row of up to {fits} tokens fits. Attach with more "
            "memory=, or with kv='int8'"
        )


class _Pack:
    """Rows that are read together: what is missing of each, in chunks of a step's size."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._rows: list[tuple[BlockTable, list[int]]] = []

    def add(self, table: BlockTable, tokens: list[int]) -> None:
        self._rows.append((table, tokens))

    def would_repeat(self, num_cached: int, tokens: list[int]) -> bool:
        """Whether a row of the pack computes the block that comes next in `tokens`: then it is better waited for."""
        size = self._attachment.cache.config.block_tokens
        place = num_cached // size * size
        block = tokens[: place + size]
        return len(block) == place + size and any(row[: place + size] == block for _, row in self._rows)

    def compute(self) -> None:
        """All rows are read. Side effects: full blocks are published; the pack is empty."""
        cache, chunk = self._attachment.cache, self._attachment._chunk_tokens
        while todo := [(table, tokens) for table, tokens in self._rows if table.num_tokens < len(tokens)]:
            step: list[tuple[BlockTable, list[int]]] = []
            room = chunk
            for table, tokens in todo:
                new = tokens[table.num_tokens : table.num_tokens + room]
                if new:
                    if not cache.allocate(table, len(new)):
                        raise self._attachment._no_room([len(tokens) for _, tokens in self._rows])
                    step.append((table, new))
                    room -= len(new)
            self._forward(step)
            cache.maintain()
        self._rows = []

    def _forward(self, step: Sequence[tuple[BlockTable, list[int]]]) -> None:
        cache = self._attachment.cache
        ids = torch.tensor([token for _, new in step for token in new])
        positions = torch.cat([torch.arange(t.next_position, t.next_position + len(new)) for t, new in step])
        kv = cache.prepare([(table, len(new)) for table, new in step])
        self._attachment._model.forward(FlatBatch(ids, positions, kv, torch.tensor([len(ids) - 1])))
        for table, new in step:
            cache.publish(table, new)


def _leaves_choice(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of `generate` would make a DynamicCache itself, and asks for nothing that pages cannot give."""
    configs = (kwargs.get("generation_config"), model.generation_config)

    def setting(name: str) -> Any:
        if kwargs.get(name) is not None:
            return kwargs[name]
        return next((value for c in configs if (value := getattr(c, name, None)) is not None), None)

    return setting("use_cache") is not False and not any(
        (setting("cache_implementation"), setting("output_attentions"), kwargs.get("inputs_embeds") is not None)
    )


def _brings_everything(cache: DynamicKVCache, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call that goes on with `cache` brings all tokens from the first on, as transformers tells it."""
    ids = next((x for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if x is not None), None)
    if ids is None or cache.batch_size < 0:
        return False
    mask = kwargs.get("attention_mask")
    return ids.shape[1] > cache.get_seq_length() if mask is None else bool(mask.shape[1] == ids.shape[1])


def _tokens_say_all(kwargs: Mapping[str, Any]) -> bool:
    """Whether nothing but tokens decides what this call's keys and values are."""
    return all(name in _UNDERSTOOD for name, value in kwargs.items() if isinstance(value, torch.Tensor))


def _positions_count(positions: torch.Tensor | None, real: torch.Tensor) -> bool:
    """Whether every row's real tokens stand at 0, 1, 2, ..."""
    counted = real.long().cumsum(dim=1) - 1  # [B, T]
    if positions is None:
        positions = torch.arange(real.shape[1])[None]
    return positions.ndim == 2 and bool(((positions == counted) | ~real).all())
