"""One forward pass of a padded batch through the cache: its layers bring their keys and values one after the other.

Knows no transformers cache and no mask function. Invariant: until `publish` the rows are as they were, so a pass may
break off anywhere and be abandoned.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ktransformer2.errors import OutOfMemoryError, RequestError, UnsupportedModelError
from ktransformer2.integrations.batch_rows import BatchRows
from ktransformer2.kernels import reference
from ktransformer2.kernels.attention import seal, store_kv
from ktransformer2.kernels.pages import DTYPES
from ktransformer2.models.hf import StepAttention
from ktransformer2.models.registry import ATTENTION_NAME, LayerCall


class ForwardStep:
    """Layers come in their order, each once: `begun` have brought their rows, `num_done` have them stored.

    `paged`: attention reads pages in place (`attend`); else every layer gets a copy of all it may see (`gathered`).
    """

    def __init__(self, rows: BatchRows, batch: tuple[int, int], real: torch.Tensor | None, paged: bool) -> None:
        """`batch`: rows and new columns; `real` bool [B, T]: which of those are no padding; None: all.

        Raises: OutOfMemoryError, RequestError; nothing has changed.
        """
        self.paged = paged
        self._rows = rows
        self._view_bytes = 0 if paged else _charge_view(rows, *batch)
        try:
            self.padded = rows.begin(*batch, real)
        except BaseException:
            rows.cache.discharge(self._view_bytes)
            raise
        self._attention = StepAttention(rows.cache.geometry, self.padded.kv)
        self._order = sorted(rows.cache.geometry.layer_place)
        self._thread = threading.get_ident()
        self._was_asked = False
        self.begun: list[int] = []
        self.num_done = 0
        self.token_ids: torch.Tensor | None = None  # [B, T], where they were told

    def take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The layer brings k [B, G, T, Dk] and v [B, G, T, Dv]. Raises UnsupportedModelError for any other shape."""
        geometry = self._rows.cache.geometry
        if self._was_asked or layer != self._order[len(self.begun)]:
            raise UnsupportedModelError(
                f"layer {layer} brings keys behind layers {self.begun} of a pass"
                + (", and the model reads the cache's length amid it" if self._was_asked else "")
                + "; every layer once and in order is served"
            )
        group = geometry.groups[geometry.layer_place[layer][0]]
        b, t = self.padded.num_rows, self.padded.num_new
        wanted = (b, group.num_kv_heads, t, group.k_head_size), (b, group.num_kv_heads, t, group.v_head_size)
        found, dtype = (tuple(key.shape), tuple(value.shape)), DTYPES[geometry.full_form]
        if found != wanted or not key.dtype == value.dtype == dtype:
            raise UnsupportedModelError(
                f"layer {layer} hands over keys and values of shape {found} in {key.dtype} and {value.dtype}; {wanted} "
                f"in {dtype} are what the model was taken to hand over"
            )
        self.begun.append(layer)

    def awaits(self, layer: int) -> bool:
        """Whether the layer has brought its rows and not attended yet."""
        return len(self.begun) > self.num_done and self.begun[-1] == layer

    def was_asked(self, layer: int) -> None:
        """The length of a layer is read while the pass runs: transformers' own caches would count its new columns for
        layers that are done. What broke off here is followed by another pass; a pass that goes on cannot be served."""
        self._was_asked |= layer in self.begun[: self.num_done] and threading.get_ident() == self._thread

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store one layer's rows; attention of query [B, H, T, Dk] over all the layer holds: [B, T, H, Dv]."""
        geometry = self._rows.cache.geometry
        window = geometry.groups[geometry.layer_place[call.layer][0]].window
        if call.window_given and call.window != window:
            raise UnsupportedModelError(f"layer {call.layer} has window {call.window}, its config says {window}")
        q, k, v = (self.padded.flat(rows.detach()) for rows in (query, key, value))
        only_padding = not self.padded.kv
        out = q.new_zeros(0, q.shape[1], v.shape[2]) if only_padding else self._attention.attend(call, q, k, v)
        padded = self.padded.padded(out)  # [N, H, Dv] -> [B, T, H, Dv]
        self.num_done += 1
        return _without_gradients(padded, query, key, value)

    def gathered(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's rows; all of it that their queries may see, [B, G, S, Dk] and [B, G, S, Dv]."""
        geometry = self._rows.cache.geometry
        group, column = geometry.layer_place[layer]
        batch, window = self.padded.kv[group], geometry.groups[group].window
        k, v = self.padded.flat(key.detach()), self.padded.flat(value.detach())
        store_kv(k, v, batch, column)
        seal(k, v, batch, column)
        views = reference.gather(k, v, batch, column, None if window is None else window - 1)
        keys, values = (torch.stack(rows).to(key.dtype) for rows in zip(*views, strict=True))
        self.num_done += 1
        return _without_gradients(keys, key), _without_gradients(values, value)

    def publish(self) -> None:
        """All layers are done. Token ids of another shape are of another call, and nobody's."""
        ids = self.token_ids
        told = ids is not None and ids.shape == (self.padded.num_rows, self.padded.num_new)
        self._rows.publish(self.padded, ids if told else None)
        self._rows.cache.discharge(self._view_bytes)
        self._rows.cache.maintain()

    def abandon(self) -> None:
        """The pass broke off; the rows are as before it."""
        self._rows.abandon()
        self._rows.cache.discharge(self._view_bytes)


class _NoGradients(torch.autograd.Function):
    """What came out of the cache, tied to what went in: a backward pass raises instead of leaving attention out."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RequestError(
            "no gradients go through this cache; call the model with use_cache=False or a transformers DynamicCache to "
            "train it, or inside torch.no_grad() to answer"
        )


def _without_gradients(out: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """`out`; where a backward pass would go on to `sources`, it raises RequestError."""
    if not torch.is_grad_enabled() or not any(source.requires_grad for source in sources):
        return out
    tied: torch.Tensor = _NoGradients.apply(out, *sources)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return tied


def _charge_view(rows: BatchRows, num_rows: int, num_new: int) -> int:
    """Count the largest gathered layer against the limit, and its copy in fp32 while it is made; its bytes."""
    geometry, columns = rows.cache.geometry, rows.num_columns + num_new
    most = max(group.elements_per_token // len(group.layers) for group in geometry.groups)
    num_bytes = num_rows * columns * most * (geometry.full_form.element_bytes + 4)
    if not rows.cache.charge(num_bytes):
        raise OutOfMemoryError(
            f"a gathered view of {columns} tokens in {num_rows} rows needs {num_bytes / 1e6:.1f} MB beside the cache, "
            f"whose limit is {rows.cache.config.memory_bytes / 1e6:.1f} MB; raise memory=, or load the model with "
            f'attn_implementation="{ATTENTION_NAME}", which needs none'
        )
    return num_bytes
