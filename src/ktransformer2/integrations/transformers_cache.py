"""The cache as a transformers `Cache`: `model.generate(**inputs, cache=DynamicKVCache(model.config, kv="int8"))`.

With attn_implementation="ktransformer2" a layer gets its rows back as handles and the kernels read pages in place; with
any other attention it gets a gathered copy of one layer at a time, counted against the limit. Importing this file makes
that attention known to transformers.

Knows no token: `Cache.update` is told none. `ktransformer2.attach` tells them, and then prefixes are found again.
Invariants: a step that fails leaves the cache as it was; one thread at a time uses it, and between steps it may change.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, parse_bytes
from ktransformer2.engine.memory_budget import Memory, auto_memory_bytes
from ktransformer2.errors import ConfigError, RequestError, UnsupportedModelError
from ktransformer2.integrations.batch_rows import BatchRows
from ktransformer2.integrations.forward_step import ForwardStep
from ktransformer2.integrations.layer_groups import described_groups
from ktransformer2.kernels.pages import FORMS
from ktransformer2.layout import LayerGroup, ModelGeometry
from ktransformer2.models.masks import causal_window, refuse_overlay
from ktransformer2.models.probe import refuse_unservable, text_config
from ktransformer2.models.registry import ATTENTION_NAME, LayerCall, PagedRows, read_next_mask, register

# What assisted generation may take back: candidates come in tens (`num_assistant_tokens` is 20).
_ASSISTED_ROLLBACK_TOKENS = 128

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
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError(
                f"DynamicKVCache({type(config).__name__}): it takes the model's config, DynamicKVCache(model.config)"
            )
        if "persist" in knobs:
            raise ConfigError(
                "a DynamicKVCache is told no token, so the next process could find nothing in it; "
                "ktransformer2.attach(model, persist=...) gives generate() a cache that is found again"
            )
        refuse_unservable(config)
        values = {"kv": kv, **knobs}
        values["memory_bytes"] = (
            auto_memory_bytes(Memory.measure(), 0, 0, 2**46) if memory == "auto" else parse_bytes(memory)
        )
        self._build(config, described_groups(config), CacheConfig.load(values))

    @classmethod
    def over(cls, config: PreTrainedConfig, rows: BatchRows) -> Self:
        """A view of `rows`, whose KVCache others use too and its owner closes."""
        found = cls.__new__(cls)
        found._build(config, rows.cache.geometry.groups, rows.cache.config)
        found._shared = True
        found._hold(rows)
        return found

    def _build(self, config: PreTrainedConfig, groups: Sequence[LayerGroup], cache_config: CacheConfig) -> None:
        self._config, self._cache_config, self._groups = config, cache_config, groups
        self._windows = {layer: group.window for group in groups for layer in group.layers}
        self._first = min(self._windows)
        super().__init__(layers=[_Layer(self, i, self._windows.get(i)) for i in range(max(self._windows) + 1)])
        self._shared = False
        self._rows: BatchRows | None = None  # from the first call on, when the dtype is known
        self._leaving: weakref.finalize[[], DynamicKVCache] | None = None
        self._step: ForwardStep | None = None
        self._mask: torch.Tensor | None = None  # bool [B, columns], of the coming step
        self._token_ids: torch.Tensor | None = None  # [B, T], of the coming step
        self._records_past = False

    def _hold(self, rows: BatchRows) -> None:
        """These are the rows from now on; when this object is gone, nobody holds them any more."""
        if self._leaving is not None:
            self._leaving.detach()
        self._rows = rows
        self._leaving = weakref.finalize(self, rows.leave)
        self._leaving.atexit = False
        if self._records_past:
            self.activate_past_recording()

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
        """Columns of the batch, padding included, without those of a step that runs or broke off."""
        if self._step is not None:
            self._step.was_asked(layer_idx)
        return 0 if self._rows is None or layer_idx not in self._windows else self._rows.num_columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, first key) that the mask of a call with `query_length` new columns describes.

        Raises: RequestError for a call without new columns, as `generate` makes of a prompt that is shorter than what
        is held.
        """
        if query_length == 0 and self._rows is not None and self._rows.num_columns:
            raise RequestError(
                f"the cache holds {self._rows.num_columns} columns and this prompt brings none beyond them; reset() it "
                "before another prompt, or use ktransformer2.attach(model), which finds what prompts share"
            )
        if self.is_paged:
            read_next_mask(self)
        columns = 0 if self._rows is None or layer_idx not in self._windows else self._rows.num_columns
        window = self._windows.get(layer_idx)
        hidden = 0 if window is None else max(0, columns - window + 1)
        return columns - hidden + query_length, hidden

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: nothing but memory bounds it."""
        return -1

    # --- a step

    def tell(self, token_ids: torch.Tensor | None) -> None:
        """The coming step brings these tokens, int64 [B, T]; None: nobody knows, and its blocks are never found."""
        self._token_ids = token_ids

    def mask(self, request: Mapping[str, Any]) -> None:
        """Called by the registered mask function. Raises UnsupportedModelError for a mask that is not causal."""
        window, windows = causal_window(request), {group.window for group in self._groups}
        if window not in windows:
            raise UnsupportedModelError(f"the model asks for a mask of window {window}; its config says {windows}")
        if not request.get("allow_is_causal_skip", True):
            refuse_overlay(request, window)
        self._mask = request.get("attention_mask")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take the new rows k [B, G, T, Dk] and v [B, G, T, Dv] of one layer; what its attention shall read.

        Raises: OutOfMemoryError, RequestError, UnsupportedModelError, OwnershipError; the cache is as before the step.
        """
        if layer_idx not in self._windows:
            raise UnsupportedModelError(
                f"layer {layer_idx} keeps keys and values of its own, which the config does not say"
            )
        try:
            step = self._step
            if step is None or (layer_idx == self._first and step.begun):
                step = self._begin(key_states)
            step.take(layer_idx, key_states, value_states)
            if step.paged:
                rows = _LayerRows(self, key_states, value_states)
                return rows, rows
            found = step.gathered(layer_idx, key_states, value_states)
            self._finish_layer(step)
        except BaseException:
            self.abandon()
            raise
        return found

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of query [B, H, T, Dk] over one layer, whose new rows are k and v: [B, T, H, Dv]."""
        step = self._step
        if step is None or not step.awaits(call.layer):
            raise UnsupportedModelError(f"layer {call.layer} attends with rows of another forward pass")
        try:
            out = step.attend(call, query, key, value)
            self._finish_layer(step)
        except BaseException:
            self.abandon()
            raise
        return out

    def _begin(self, key: torch.Tensor) -> ForwardStep:
        self.abandon()  # what a call that broke off has left
        mask, self._mask = self._mask, None
        rows, paged = self._rows_for(key), self.is_paged
        num_rows, num_new = key.shape[0], key.shape[2]
        if not paged and rows.has_padding:
            raise RequestError("the cache holds a padded batch of paged attention; reset() it before another attention")
        if self._records_past and rows.num_columns and num_new > rows.rollback_tokens:
            rows.set_rollback(num_new)
        real = rows.new_columns(mask, num_new) if paged else None
        step = self._step = ForwardStep(rows, (num_rows, num_new), real, paged)
        step.token_ids, self._token_ids = self._token_ids, None
        return step

    def _finish_layer(self, step: ForwardStep) -> None:
        if step.num_done == len(self._windows):
            self._step = None
            step.publish()
            self._hand_over()

    def abandon(self) -> None:
        """Forget a forward pass that broke off. The next one does so too; here the memory it took goes back at once."""
        step, self._step = self._step, None
        if step is not None:
            step.abandon()
        self._hand_over()

    def _hand_over(self) -> None:
        if self._rows is not None:
            self._rows.cache.hand_over()

    def _rows_for(self, key: torch.Tensor) -> BatchRows:
        """The rows; anew where there are none yet, or where nothing is held and the keys' type has changed."""
        rows = self._rows
        if rows is not None and (self._shared or len(rows) or rows.cache.geometry.full_form == FORMS.get(key.dtype)):
            return rows
        if key.device.type != "cpu":
            raise UnsupportedModelError(
                f"keys lie on {key.device}; this version caches in host memory: use model.cpu()"
            )
        if key.dtype not in FORMS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMS)
            raise UnsupportedModelError(f"the model computes keys in {key.dtype}; {allowed} are held")
        groups = tuple(self._groups)
        refused = "a DynamicKVCache moves nothing"
        geometry = ModelGeometry(groups, FORMS[key.dtype], 2**31 - 1, (None,) * len(groups), refused)
        rows = BatchRows(KVCache(geometry, self._cache_config))
        self._hold(rows)
        return rows

    # --- the rest of the contract

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last -`tokens_to_remove` columns back (transformers counts them below zero).

        Exact within a rollback's reach; further back in int8, the block that is cut stays in int8.
        Raises: ValueError above zero; ConfigError where a sliding window let go what would come into view, and nothing
        has changed; OutOfMemoryError.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give a negative number, that of the tokens to remove")
        self.abandon()
        if tokens_to_remove and self._rows is not None and len(self._rows):
            try:
                self._rows.crop(-tokens_to_remove)
            finally:
                self._hand_over()

    def reset(self) -> None:
        """No tokens any more; the memory goes back, but for what a shared cache keeps for others."""
        self.abandon()
        self._mask = self._token_ids = None
        if self._rows is not None:
            self._rows.release()
            if self._shared:
                self._rows.cache.maintain()
            else:
                self._rows.cache.clear()
            self._hand_over()

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
        self.abandon()
        if self._rows is not None and len(self._rows):
            try:
                self._rows.select(rows)
            finally:
                self._hand_over()

    def activate_past_recording(self) -> None:
        """From now on the newest tokens can be taken back exactly, as assisted generation does."""
        self._records_past = True
        if self._rows is not None and self._rows.rollback_tokens < _ASSISTED_ROLLBACK_TOKENS:
            self._rows.set_rollback(_ASSISTED_ROLLBACK_TOKENS)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another cache with the same tokens: rows share their blocks until one goes on. The limit is shared too."""
        self.abandon()
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other._build(self._config, self._groups, self._cache_config)
        other._records_past, other._shared = self._records_past, self._shared
        if self._rows is not None:
            other._hold(self._rows.copy())
            self._hand_over()
        return other

    def __reduce__(self) -> Any:
        raise TypeError("a DynamicKVCache holds memory of this process and cannot be pickled; copy.deepcopy() works")

    def __repr__(self) -> str:
        return (
            f"DynamicKVCache(rows={max(self.batch_size, 0)}, columns="
            f"{0 if self._rows is None else self._rows.num_columns}, {self._cache_config.kv})"
        )


class _LayerRows(PagedRows):
    """The new rows of one layer, which are stored when its queries come."""

    def __init__(self, owner: DynamicKVCache, key: torch.Tensor, value: torch.Tensor) -> None:
        self._owner, self._key, self._value = owner, key, value

    def attend(self, call: LayerCall, query: torch.Tensor) -> torch.Tensor:
        return self._owner.attend(call, query, self._key, self._value)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers leaves its hook unannotated
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
