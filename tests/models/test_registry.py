"""Nothing that a model says about its attention is dropped silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ktransformer2.errors import UnsupportedModelError
from ktransformer2.models.registry import ATTENTION_NAME, LayerCall, attention, receiving, register


class Layer(torch.nn.Module):
    layer_idx = 3


class Notebook:
    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.calls.append(call)
        return q[..., : v.shape[-1]]

    def mask(self, request: Mapping[str, Any]) -> None: ...


Q, K, V = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 8)


def call(**keywords: Any) -> LayerCall:
    notebook = Notebook()
    with receiving(notebook):
        out, weights = attention(Layer(), Q, K, V, **keywords)
    assert weights is None
    assert torch.equal(out, Q.transpose(1, 2)[..., :8])
    return notebook.calls[0]


def test_what_models_say_arrives() -> None:
    sinks = torch.arange(4, dtype=torch.bfloat16)
    seen = call(scaling=0.5, dropout=0.0, sliding_window=12, softcap=30.0, s_aux=sinks, is_causal=True, position_ids=Q)
    assert (seen.layer, seen.scale, seen.window, seen.window_given, seen.softcap) == (3, 0.5, 12, True, 30.0)
    assert seen.sinks is not None
    assert seen.sinks.dtype == torch.float32


def test_defaults() -> None:
    seen = call(scaling=None, softcap=None, output_attentions=False, block_indices=None)
    assert (seen.scale, seen.window, seen.window_given, seen.softcap, seen.sinks) == (0.25, None, False, None, None)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("position_bias", Q),
        ("indices", Q),
        ("cu_seq_lens_q", Q),
        ("sinks", Q),
        ("never_heard_of", 0),
        ("dropout", 0.1),
        ("output_attentions", True),
        ("is_causal", False),
        ("attention_mask", Q),
    ],
)
def test_anything_else_is_refused(keyword: str, value: Any) -> None:
    with receiving(Notebook()), pytest.raises(UnsupportedModelError, match="Layer"):
        attention(Layer(), Q, K, V, **{keyword: value})


def test_a_layer_without_a_number_is_refused() -> None:
    with receiving(Notebook()), pytest.raises(UnsupportedModelError, match="layer_idx"):
        attention(torch.nn.Identity(), Q, K, V)


def test_two_rows_are_refused() -> None:
    with receiving(Notebook()), pytest.raises(UnsupportedModelError, match="2 rows"):
        attention(Layer(), *(torch.cat([t, t]) for t in (Q, K, V)))


def test_outside_a_step_there_is_no_attention() -> None:
    with pytest.raises(UnsupportedModelError, match="from a cache of this package"):
        attention(Layer(), Q, K, V)


def test_both_registries_know_the_name() -> None:
    register()
    assert ATTENTION_NAME in AttentionInterface._global_mapping
    assert ATTENTION_NAME in AttentionMaskInterface._global_mapping
