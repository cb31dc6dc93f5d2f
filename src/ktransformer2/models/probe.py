"""What a model's attention layers are, found by watching one tiny forward pass, and checked against its config.

A config says what a model should do; what reaches the cache is what its layers hand over. So the same token is sent
sixteen times through the model while the attention answers zero. Without attention every position computes the same
hidden states, and a layer's keys differ by their rotation alone: each rotary frequency table of the model is tried on
them, and what does not fit may not be shifted. Head sizes, windows and masks are seen in the same pass. Two more passes
show that tokens do not depend on their neighbours (`independence`).

Knows no page and no cache. Side effects: none that last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ktransformer2.errors import UnsupportedModelError
from ktransformer2.kernels.pages import FORMS
from ktransformer2.kernels.rope import turn
from ktransformer2.layout import Form, LayerGroup, ModelGeometry, RopeSpec
from ktransformer2.models.independence import pass_row, refuse_dependent_rows
from ktransformer2.models.masks import causal_window
from ktransformer2.models.registry import LayerCall

_PROBE_TOKENS = 16
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
_BOTH = (True, "all")
_RECURRENT_KINDS = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention"})
# Largest relative distance between a key and the rotated first key: rounding of cos, sin and the products.
_ROPE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# What the native kernels hold in registers and on the stack.
_HEAD_SIZE_MULTIPLE, _MAX_HEAD_SIZE = 8, 256


@dataclass(frozen=True)
class SeenLayer:
    """What one layer handed over: k [T, G, Dk] and the sizes around it."""

    call: LayerCall
    num_heads: int
    k: torch.Tensor
    v_head_size: int


@dataclass
class _Watch:
    """A receiver that remembers and answers zero."""

    layers: dict[int, SeenLayer] = field(default_factory=dict)
    mask_windows: set[int | None] = field(default_factory=set)

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if call.layer in self.layers:
            raise UnsupportedModelError(
                f"layer {call.layer} attends twice in one pass; only one KV per layer is served"
            )
        if k.dtype != v.dtype or k.dtype not in FORMS:
            raise UnsupportedModelError(f"layer {call.layer} computes keys in {k.dtype} and values in {v.dtype}")
        self.layers[call.layer] = SeenLayer(call, q.shape[1], k.clone(), v.shape[-1])
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])

    def mask(self, request: Mapping[str, Any]) -> None:
        """Raises UnsupportedModelError unless the mask is causal, with or without a sliding window."""
        self.mask_windows.add(causal_window(request))


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that describes the decoder (the config itself for a plain text model)."""
    return config.get_text_config(decoder=True)


def _layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The config of every layer where they differ (transformers then names no common value), else one for all."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _reuses_kv(config: PreTrainedConfig) -> bool:
    modes = getattr(config, "kv_sharing_modes", None) or ()  # per layer: None, store, or some way to reuse
    return any("reuse" in (mode or "") for mode in modes)


def refuse_unservable(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError for what can be told from the config alone, before any weight is read."""
    decoder, name = text_config(config), config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models are served")
    if any(getattr(layer, "kv_lora_rank", None) is not None for layer in _layer_configs(decoder)):
        raise UnsupportedModelError(
            f"{name} uses latent attention (MLA, kv_lora_rank); its cache is not made of K and V"
        )
    # "vision": in both directions among the tokens of one image; what is served here is text.
    if getattr(decoder, "is_causal", True) is False or getattr(decoder, "use_bidirectional_attention", None) in _BOTH:
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models can be cached")
    if getattr(decoder, "num_kv_shared_layers", None) or _reuses_kv(decoder):
        raise UnsupportedModelError(f"{name} shares keys and values between layers, which is not served")
    kinds = set(getattr(decoder, "layer_types", None) or ()) - _LAYER_KINDS
    if recurrent := sorted(kinds & _RECURRENT_KINDS):
        raise UnsupportedModelError(
            f"{name} has layers with a recurrent state ({', '.join(recurrent)}), which a KV cache cannot hold"
        )
    if kinds or (getattr(decoder, "layer_types", None) is None and getattr(decoder, "attention_chunk_size", None)):
        found = ", ".join(sorted(kinds)) or "chunked_attention"
        raise UnsupportedModelError(
            f"{name} has layers of kind {found}; {' and '.join(sorted(_LAYER_KINDS))} are served"
        )


def observe(model: PreTrainedModel) -> ModelGeometry:
    """The geometry of `model`, whose attention must already be the registered one. Raises UnsupportedModelError."""
    config = text_config(model.config)
    watch = _Watch()
    token = torch.tensor(_visible_token(model))
    pass_row(model, token.expand(_PROBE_TOKENS), torch.arange(_PROBE_TOKENS), watch, num_logits=1)
    # Layers that read an image are passed over where there is none: text is served.
    expected = set(range(config.num_hidden_layers)) - set(getattr(config, "cross_attention_layers", None) or ())
    missing = sorted(expected ^ set(watch.layers))
    if missing:
        raise UnsupportedModelError(
            f"{config.model_type}: layers {missing} hold no attention that can be replaced "
            "(recurrent state, or attention outside the transformers registry)"
        )
    max_positions = _max_positions(config)
    ropes, refused = _ropes(model, watch)
    forms = {FORMS[seen.k.dtype] for seen in watch.layers.values()}
    if len(forms) > 1:
        raise UnsupportedModelError(f"{config.model_type} computes its layers in different types: {sorted(forms)}")
    geometry = _grouped(_windows(config, watch), watch, ropes, refused, (forms.pop(), max_positions))
    refuse_dependent_rows(model, max_positions)
    return geometry


def _grouped(
    windows: dict[int, int | None],
    watch: _Watch,
    ropes: dict[int, RopeSpec | None],
    refused: str,
    form_and_positions: tuple[Form, int],
) -> ModelGeometry:
    alike: dict[tuple[Any, ...], list[int]] = {}
    for layer, seen in sorted(watch.layers.items()):
        num_kv_heads, k_size = seen.k.shape[1:]
        for size in (k_size, seen.v_head_size):
            if size % _HEAD_SIZE_MULTIPLE or size > _MAX_HEAD_SIZE:
                raise UnsupportedModelError(
                    f"layer {layer} has head size {size}; multiples of {_HEAD_SIZE_MULTIPLE} up to {_MAX_HEAD_SIZE} "
                    "are served"
                )
        if seen.num_heads % num_kv_heads:
            raise UnsupportedModelError(f"layer {layer}: {seen.num_heads} query heads over {num_kv_heads} KV heads")
        alike.setdefault((windows[layer], num_kv_heads, k_size, seen.v_head_size, ropes[layer]), []).append(layer)
    full_form, max_positions = form_and_positions
    return ModelGeometry(
        groups=tuple(
            LayerGroup(tuple(layers), heads, k_size, v_size, window)
            for (window, heads, k_size, v_size, _), layers in alike.items()
        ),
        full_form=full_form,
        max_positions=max_positions,
        rope=tuple(rope for *_, rope in alike),
        shift_refused=refused,
    )


def _windows(config: PreTrainedConfig, watch: _Watch) -> dict[int, int | None]:
    """Window of every layer; what the config says, what the layer says and the masks it asks for must agree."""
    configs = _layer_configs(config)
    kinds = getattr(config, "layer_types", None)
    windows: dict[int, int | None] = {}
    for layer, seen in watch.layers.items():
        window: int | None = getattr(configs[layer % len(configs)], "sliding_window", None)
        sliding = window is not None and (kinds is None or kinds[layer] == "sliding_attention")
        windows[layer] = window if sliding else None
        if seen.call.window_given and seen.call.window != windows[layer]:
            raise UnsupportedModelError(
                f"layer {layer} says its window is {seen.call.window}, the config says {windows[layer]}"
            )
        if windows[layer] not in watch.mask_windows and (
            watch.mask_windows or (sliding and not seen.call.window_given)
        ):
            config_says = windows[layer] or "none"
            masks_say = ", ".join(str(window or "none") for window in watch.mask_windows) or "nothing"
            raise UnsupportedModelError(
                f"layer {layer}: the config gives it the window {config_says}, the masks it asks for say {masks_say}"
            )
    return windows


def _visible_token(model: PreTrainedModel) -> int:
    """A token whose embedding is not zero (padding tokens have a zero row, which no rotation shows)."""
    table: torch.Tensor = model.get_input_embeddings().get_parameter("weight")
    candidates = torch.linspace(0, table.shape[0] - 1, steps=min(16, table.shape[0])).long()
    return int(candidates[table[candidates].float().norm(dim=-1).argmax()])


def _rope_kinds(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Every rope description of a config: one, or one per layer kind."""
    described = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in described.values() if isinstance(value, Mapping)]
    return nested or [described]


def _max_positions(config: PreTrainedConfig) -> int:
    """How many positions can be served: all of the model's own, or those where its rotation does not change.

    transformers takes the frequencies of longrope and dynamic NTK (and the scale of PhiMoE) from the largest position
    of the whole row. In a flat batch that is some other sequence's, and a text that passes the switch would want its
    old keys rotated anew. Up to the switch there is one table, so there is nothing to get wrong.
    """
    named = getattr(config, "max_position_embeddings", None)
    if named is None:
        raise UnsupportedModelError(f"{config.model_type} does not say how many positions it has")
    limits = [int(named)]  # dynamic NTK leaves its first table there
    for rope in _rope_kinds(config):
        if rope.get("rope_type") == "longrope" or "long_mscale" in rope:
            limits.append(int(rope["original_max_position_embeddings"]))  # without it the model cannot compute
    return min(limits)


def _refused_by_config(config: PreTrainedConfig) -> str:
    for rope in _rope_kinds(config):
        kind = rope.get("rope_type", "default")
        if "dynamic" in kind:
            return "dynamic NTK rope: its frequencies depend on the length of the text"
        if kind == "longrope":
            return "longrope: its frequencies switch with the length of the text"
        if "mrope_section" in rope:
            return "M-RoPE: a position has several parts"
    return ""


def _ropes(model: PreTrainedModel, watch: _Watch) -> tuple[dict[int, RopeSpec | None], str]:
    """Rope of every layer, and why keys may not be moved (then every rope is None)."""
    refused = _refused_by_config(text_config(model.config))
    nothing: dict[int, RopeSpec | None] = dict.fromkeys(watch.layers)
    if refused:
        return nothing, refused
    tables = {
        tuple(buffer.float().tolist())
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and buffer.ndim == 1
    }
    specs = [RopeSpec(table, interleaved) for table in sorted(tables) for interleaved in (False, True)]
    ropes: dict[int, RopeSpec | None] = {}
    for layer, seen in watch.layers.items():
        fits = [spec for spec in (None, *specs) if _rotates_by(seen.k, spec)]
        if not fits:
            return nothing, f"the keys of layer {layer} do not follow a fixed-frequency rotation that is known"
        ropes[layer] = fits[0]
    return ropes, ""


def _rotates_by(k: torch.Tensor, spec: RopeSpec | None) -> bool:
    """Whether keys [T, G, Dk] of one token at positions 0..T-1 are the first key, rotated by `spec` (None: not)."""
    first, tolerance = k[0].float(), _ROPE_TOLERANCE[k.dtype]
    size = first.norm()
    if size == 0 or (spec is not None and spec.rotary_size > k.shape[-1]):
        return False
    for position in range(1, k.shape[0]):
        expected = first if spec is None else turn(first, position, spec)
        if (k[position].float() - expected).norm() > tolerance * size:
            return False
    return True
