"""Geometries that scenarios use without a model. Knows no weights.

SmolLM2-135M: 30 layers, 3 KV heads of size 64, rope theta 100,000: 11,520 KV elements a token, 23,040 bytes in bf16.
"""

from __future__ import annotations

from ktransformer2.layout import SCALE_BYTES, ExtentLayout, Form, LayerGroup, ModelGeometry, RopeSpec

STATIC_TOKENS = 8192
_THETA = 100_000.0


def _rope(head_size: int) -> RopeSpec:
    return RopeSpec(tuple(_THETA ** (-2 * i / head_size) for i in range(head_size // 2)))


def geometry(num_layers: int, num_kv_heads: int, head_size: int, max_positions: int) -> ModelGeometry:
    """A plain model computed in bf16: one layer group, K and V of one size."""
    group = LayerGroup(tuple(range(num_layers)), num_kv_heads, head_size, head_size)
    return ModelGeometry((group,), Form.BF16, max_positions, (_rope(head_size),))


def smollm2(max_positions: int = STATIC_TOKENS) -> ModelGeometry:
    """The pinned model's geometry, with the context length of the trace that is replayed."""
    return geometry(30, 3, 64, max_positions)


def token_bytes(group: LayerGroup, form: Form) -> int:
    """Bytes of one token's rows in `form`, scales included, padding not."""
    scales = 0 if form.is_full else 2 * len(group.layers) * group.num_kv_heads * SCALE_BYTES
    return group.elements_per_token * form.element_bytes + scales


def block_bytes(group: LayerGroup, form: Form, block_tokens: int) -> int:
    """Bytes of one block's extent, padding included."""
    return ExtentLayout.uniform(group, block_tokens, form).extent_bytes
