"""The cache as a transformers `Cache`: `model.generate(**inputs, cache=DynamicKVCache(model.config, kv="int8"))`.

With attn_implementation="ktransformer2" a layer gets its rows back as handles and the kernels read pages in place; with
any other attention it gets a gathered copy of one layer at a time, counted against the limit. Importing this file makes
that attention known to transformers.

Knows no token: `Cache.update` is told none. `ktransformer2.attach` tells them, and then prefixes are found again.
Invariants: a step that fails leaves the cache as it was; one thread at a time uses it, and between steps it may change.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, parse_bytes
from ktransformer2.engine.memory_budget import Memory, auto_memory_bytes
from ktransformer2.errors import OutOfMemoryError, RequestError, UnsupportedModelError
from ktransformer2.integrations.batch_rows import BatchRows, PaddedStep
from ktransformer2.kernels import reference
from ktransformer2.kernels.attention import seal, store_kv
from ktransformer2.kernels.pages import DTYPES, FORMS
from ktransformer2.layout import LayerGroup, ModelGeometry
from ktransformer2.models.hf import StepAttention
from ktransformer2.models.probe import causal_window, refuse_unservable, text_config
from ktransformer2.models.registry import ATTENTION_NAME, LayerCall, PagedRows, read_next_mask, register

# What assisted generation may take back: candidates come in tens (`num_assistant_tokens` is 20).
_ASSISTED_ROLLBACK_TOKENS = 64

register()


class DynamicKVCache(Cache):
    """A transformers cache whose memory follows the text: paged, growing, int8 where it is full, given back at the end.

    For one batch of any size, as transformers' own caches are: `reset` before another one. Beams, assisted generation,
    cropping, repeating and selecting rows, `copy.deepcopy` (rows share their blocks), and left-padded batches work.
    """

    def __init__(self, config: PreTrainedConfig, *, kv: str = "auto", memory: str | int = "auto", **knobs: Any) -> None:
        """`config`: the model's. `kv`: auto, full or int8, the form of full blocks. `memory`: the hard limit, such as
        "2GB"; auto: 0.8 x what the machine has free. `knobs`: any other field of CacheConfig.

        Raises: ConfigError, OutOfMemoryError, UnsupportedModelError for a model that cannot be served exactly.
        """
        refuse_unservable(config)
        values = {"kv": kv, **knobs}
        values["memory_bytes"] = _auto_bytes() if memory == "auto" else parse_bytes(memory)
        self._build(config, _groups(config), CacheConfig.load(values))

    @classmethod
    def over(cls, config: PreTrainedConfig, cache: KVCache) -> Self:
        """Rows in a KVCache that others use too, and that its owner closes."""
        found = cls.__new__(cls)
        found._build(config, cache.geometry.groups, cache.config)
        found._start(cache)
        return found

    def _build(self, config: PreTrainedConfig, groups: Sequence[LayerGroup], cache_config: CacheConfig) -> None:
        self._config, self._cache_config, self._groups = config, cache_config, groups
        self._windows = {layer: group.window for group in groups for layer in group.layers}
        super().__init__(layers=[_PagedLayer(self, i, self._windows[i]) for i in sorted(self._windows)])
        self._rows: BatchRows | None = None  # from the first call on, when the dtype is known
        self._step: _Step | None = None
        self._mask: torch.Tensor | None = None  # bool [B, columns], of the coming step
        self._token_ids: torch.Tensor | None = None  # [B, T], of the coming step
        self._records_past = False

    # --- what there is

    @property
    def kv(self) -> KVCache | None:
        """The cache below, for its `stats()`; None before the first token."""
        return None if self._rows is None else self._rows.cache

    @property
    def rows(self) -> BatchRows | None:
        return self._rows

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first token."""
        return len(self._rows) if self._rows is not None and len(self._rows) else -1

    @property
    def is_paged(self) -> bool:
        """Whether attention reads pages in place; else every layer gets a gathered copy."""
        name: str = text_config(self._config)._attn_implementation
        return name == ATTENTION_NAME

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that layer `layer_idx` holds, padding included."""
        step, columns = self._step, 0 if self._rows is None else self._rows.num_columns
        return columns + (step.padded.num_new if step is not None and layer_idx in step.done else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, first key) that the mask of a call with `query_length` new columns describes."""
        if self.is_paged:
            read_next_mask(self)
        columns, window = self.get_seq_length(layer_idx), self._windows[layer_idx]
        hidden = 0 if window is None else max(0, columns - window + 1)
        return columns - hidden + query_length, hidden

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: nothing but memory bounds it."""
        return -1

    # --- a step

    def tell(self, token_ids: torch.Tensor) -> None:
        """The coming step brings these tokens, int64 [B, T]. Told in every step, blocks can be found by prefix."""
        self._token_ids = token_ids

    def mask(self, request: Mapping[str, Any]) -> None:
        """Called by the registered mask function. Raises UnsupportedModelError for a mask that is not causal."""
        window, windows = causal_window(request), {group.window for group in self._groups}
        if window not in windows:
            raise UnsupportedModelError(f"the model asks for a mask of window {window}; its config says {windows}")
        self._mask = request.get("attention_mask")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take the new rows k [B, G, T, Dk] and v [B, G, T, Dv] of one layer; what its attention shall read.

        Raises: OutOfMemoryError, RequestError, UnsupportedModelError, OwnershipError; the cache is as before the step.
        """
        step = self._step
        if step is None or layer_idx in step.done:
            step = self._begin(key_states)
        try:
            self._check(key_states, value_states, layer_idx, step)
            if step.paged:
                rows = _LayerRows(self, layer_idx, key_states, value_states)
                return rows, rows
            return self._gathered(step, layer_idx, key_states.detach(), value_states.detach())
        except BaseException:
            self._abandon()
            raise

    def _begin(self, key: torch.Tensor) -> _Step:
        self._abandon()  # what a call that broke off has left
        rows = self._rows or self._start(self._new_cache(key))
        num_rows, num_new, paged = key.shape[0], key.shape[2], self.is_paged
        mask, self._mask = self._mask, None
        if not paged and rows.has_padding:
            raise RequestError("the cache holds a padded batch of paged attention; reset() it before another attention")
        if self._records_past and num_new > rows.rollback_tokens and rows.num_columns:
            rows.set_rollback(num_new)
        real = rows.check_mask(mask, num_new) if paged and mask is not None else None
        view_bytes = 0 if paged else self._charge_view(rows, num_rows, num_new)
        try:
            padded = rows.begin(num_rows, num_new, real)
        except BaseException:
            rows.cache.discharge(view_bytes)
            raise
        self._step = _Step(padded, StepAttention(rows.cache.geometry, padded.kv), paged, view_bytes)
        return self._step

    def _finish(self, layer_idx: int) -> None:
        step, rows = self._step, self._rows
        assert step is not None, "no step runs"
        assert rows is not None, "there are no rows"
        step.done.add(layer_idx)
        if len(step.done) < len(self.layers):
            return
        ids, self._token_ids, self._step = self._token_ids, None, None
        if ids is not None and ids.shape != (step.padded.num_rows, step.padded.num_new):
            ids = None  # of another call
        rows.publish(step.padded, ids)
        rows.cache.discharge(step.view_bytes)
        rows.cache.maintain()
        rows.cache.hand_over()

    def _abandon(self) -> None:
        step, self._step = self._step, None
        if step is not None and self._rows is not None:
            self._rows.abandon()
            self._rows.cache.discharge(step.view_bytes)
            self._rows.cache.hand_over()

    def _new_cache(self, key: torch.Tensor) -> KVCache:
        if key.device.type != "cpu":
            raise UnsupportedModelError(
                f"keys lie on {key.device}; this version caches in host memory: use model.cpu()"
            )
        if key.dtype not in FORMS:
            raise UnsupportedModelError(
                f"the model computes keys in {key.dtype}; float32, bfloat16 and float16 are held"
            )
        groups = tuple(self._groups)
        refused = "a DynamicKVCache moves nothing"
        geometry = ModelGeometry(groups, FORMS[key.dtype], 2**31 - 1, (None,) * len(groups), refused)
        return KVCache(geometry, self._cache_config)

    def _start(self, cache: KVCache) -> BatchRows:
        self._rows = BatchRows(cache)
        if self._records_past:
            self.activate_past_recording()
        return self._rows

    def _check(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, step: _Step) -> None:
        geometry = step.attention.geometry
        group = geometry.groups[geometry.layer_place[layer_idx][0]]
        b, t = step.padded.num_rows, step.padded.num_new
        wanted = (b, group.num_kv_heads, t, group.k_head_size), (b, group.num_kv_heads, t, group.v_head_size)
        found, dtype = (tuple(key.shape), tuple(value.shape)), DTYPES[geometry.full_form]
        if found != wanted or not key.dtype == value.dtype == dtype:
            raise UnsupportedModelError(
                f"layer {layer_idx} hands over keys and values of shape {found} in {key.dtype} and {value.dtype}; its "
                f"config says {wanted}, and the cache holds {dtype}"
            )

    # --- attention that knows no pages

    def _gathered(
        self, step: _Step, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the rows of one layer; all of it that its queries may see, [B, G, S, Dk] and [B, G, S, Dv]."""
        geometry = step.attention.geometry
        group, column = geometry.layer_place[layer]
        batch, window = step.padded.kv[group], geometry.groups[group].window
        k, v = step.padded.flat(key), step.padded.flat(value)
        store_kv(k, v, batch, column)
        seal(k, v, batch, column)
        views = reference.gather(k, v, batch, column, None if window is None else window - 1)
        keys, values = (torch.stack(rows).to(key.dtype) for rows in zip(*views, strict=True))
        self._finish(layer)
        return keys, values

    def _charge_view(self, rows: BatchRows, num_rows: int, num_new: int) -> int:
        """Count the largest gathered layer against the limit, and its copy in fp32 while it is made; its bytes."""
        geometry = rows.cache.geometry
        size = geometry.full_form.element_bytes + 4
        most = max(group.elements_per_token // len(group.layers) for group in geometry.groups)
        num_bytes = num_rows * (rows.num_columns + num_new) * most * size
        if not rows.cache.charge(num_bytes):
            raise OutOfMemoryError(
                f"a gathered view of {rows.num_columns + num_new} tokens in {num_rows} rows needs "
                f"{num_bytes / 1e6:.1f} MB beside the cache, whose limit is {rows.cache.config.memory_bytes / 1e6:.1f} "
                f'MB; raise memory=, or load the model with attn_implementation="{ATTENTION_NAME}", '
                "which needs none"
            )
        return num_bytes

    # --- the rest of the contract

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last -`tokens_to_remove` columns back (transformers counts them below zero).

        Exact within a rollback's reach; further back in int8, the block that is cut stays in int8.
        Raises: ValueError above zero; ConfigError where a sliding window let go what would come into view.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give a negative number, that of the tokens to remove")
        self._abandon()
        if tokens_to_remove and self._rows is not None:
            self._rows.crop(-tokens_to_remove)
            self._rows.cache.hand_over()

    def reset(self) -> None:
        """No tokens any more; the memory goes back, but for what a shared cache keeps for others."""
        self._abandon()
        self._mask = self._token_ids = None
        if self._rows is not None:
            self._rows.release()
            self._rows.cache.maintain()
            self._rows.cache.hand_over()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side; copies share their blocks."""
        self._select([row for row in range(max(self.batch_size, 0)) for _ in range(repeats)])

    def _select(self, rows: Sequence[int]) -> None:
        self._abandon()
        if self._rows is not None and len(self._rows):
            self._rows.select(rows)
            self._rows.cache.hand_over()

    def activate_past_recording(self) -> None:
        """From now on the newest tokens can be taken back exactly, as assisted generation does."""
        self._records_past = True
        if self._rows is not None and self._rows.rollback_tokens < _ASSISTED_ROLLBACK_TOKENS:
            self._rows.set_rollback(_ASSISTED_ROLLBACK_TOKENS)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another cache with the same tokens: rows share their blocks until one goes on. The limit is shared too."""
        self._abandon()
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other._build(self._config, self._groups, self._cache_config)
        other._records_past = self._records_past
        if self._rows is not None:
            other._rows = self._rows.copy()
            self._rows.cache.hand_over()
        return other

    def __reduce__(self) -> Any:
        raise TypeError("a DynamicKVCache holds memory of this process and cannot be pickled")

    def __repr__(self) -> str:
        return (
            f"DynamicKVCache(rows={max(self.batch_size, 0)}, columns={self.get_seq_length()}, {self._cache_config.kv})"
        )


@dataclasses.dataclass
class _Step:
    """One forward pass: its layers come one after the other; `done` are those that have."""

    padded: PaddedStep
    attention: StepAttention
    paged: bool
    view_bytes: int
    done: set[int] = dataclasses.field(default_factory=set)


class _LayerRows(PagedRows):
    """The new rows of one layer, which are stored when its queries come."""

    def __init__(self, owner: DynamicKVCache, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._owner, self._layer, self._key, self._value = owner, layer, key, value

    def attend(self, call: LayerCall, query: torch.Tensor) -> torch.Tensor:
        owner, step = self._owner, self._owner._step
        assert step is not None, f"layer {self._layer} attends outside a step"
        window = self._owner._windows[self._layer]
        if call.window_given and call.window != window:
            raise UnsupportedModelError(f"layer {self._layer} has window {call.window}, its config says {window}")
        try:
            q, k, v = (step.padded.flat(rows.detach()) for rows in (query, self._key, self._value))
            only_padding = not step.padded.kv
            out = q.new_zeros(0, q.shape[1], v.shape[2]) if only_padding else step.attention.attend(call, q, k, v)
            padded = step.padded.padded(out)  # [N, H, Dv] -> [B, T, H, Dv]
        except BaseException:
            owner._abandon()
            raise
        owner._finish(self._layer)
        return padded


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers leaves its hook unannotated
    """What transformers may ask of one layer; everything is the whole cache's work."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: DynamicKVCache, index: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self._owner, self._index = weakref.ref(owner), index
        self.is_sliding = window is not None

    @property
    def _cache(self) -> DynamicKVCache:
        owner = self._owner()
        assert owner is not None, "the layer outlived its cache"
        return owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory is taken as tokens come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        return self._cache.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._index)

    def get_max_length(self) -> int:
        return -1


def _auto_bytes() -> int:
    return auto_memory_bytes(Memory.measure(), 0, 0, 2**46)


def _groups(config: PreTrainedConfig) -> tuple[LayerGroup, ...]:
    """Layer groups as a config describes them."""
    decoder = text_config(config)
    heads = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
    size = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    window, kinds = getattr(decoder, "sliding_window", None), getattr(decoder, "layer_types", None)
    layers: dict[int | None, list[int]] = {}
    for layer in range(decoder.num_hidden_layers):
        sliding = window is not None and (kinds is None or kinds[layer] == "sliding_attention")
        layers.setdefault(window if sliding else None, []).append(layer)
    return tuple(LayerGroup(tuple(found), heads, size, size, each) for each, found in layers.items())
