"""What the layers of a model hand to a cache, as its config describes them: before there is a model to watch.

A config says less than a model does. What it leaves out and is known of an architecture stands here; what is not known
shows when the first keys come, whose shapes the cache compares with these groups, and refuses by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktransformer2.errors import UnsupportedModelError
from ktransformer2.layout import LayerGroup
from ktransformer2.models.probe import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Layers with a sliding window have twice the KV heads; the config does not say so, the model's code does.
_DOUBLE_HEADS_IN_WINDOWS = frozenset({"mimo_v2_flash"})


def described_groups(config: PreTrainedConfig) -> tuple[LayerGroup, ...]:
    """Layers of equal head shapes and window together, in the order of the first of each.

    Raises: UnsupportedModelError for a config that does not describe its layers as others do.
    """
    try:
        return _alike(text_config(config))
    except (AttributeError, IndexError, TypeError) as error:
        raise UnsupportedModelError(
            f"the config of {config.model_type} does not say what its layers hand to a cache ({error})"
        ) from error


def _alike(decoder: PreTrainedConfig) -> tuple[LayerGroup, ...]:
    kinds = getattr(decoder, "layer_types", None)
    # Layers that read an image keep nothing where there is none: text is served.
    passed_over = set(getattr(decoder, "cross_attention_layers", None) or ())
    alike: dict[tuple[int, int, int, int | None], list[int]] = {}
    for layer, own in enumerate(_config_of_layers(decoder)):
        window = getattr(own, "sliding_window", None)
        sliding = window is not None and (kinds is None or kinds[layer] == "sliding_attention")
        if layer not in passed_over:
            alike.setdefault((*_head_shape(own, sliding), window if sliding else None), []).append(layer)
    return tuple(
        LayerGroup(tuple(layers), heads, k_size, v_size, window)
        for (heads, k_size, v_size, window), layers in alike.items()
    )


def _config_of_layers(decoder: PreTrainedConfig) -> list[PreTrainedConfig]:
    """One for each layer; they differ where transformers calls the config heterogeneous."""
    if getattr(decoder, "is_heterogeneous", False):
        return list(decoder.per_layer_config)
    return [decoder] * decoder.num_hidden_layers


def _head_shape(config: PreTrainedConfig, sliding: bool) -> tuple[int, int, int]:
    """KV heads, size of a key head, size of a value head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if sliding and config.model_type in _DOUBLE_HEADS_IN_WINDOWS:
        heads *= 2
    return heads, size, getattr(config, "v_head_dim", None) or size
