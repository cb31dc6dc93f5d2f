"""Small copies keep what an architecture is, and lose its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ktransformer2.errors import ModelError
from ktransformer2.models.tiny import build_random, causal_architectures, tiny_config


def decoder(model_type: str) -> Any:
    return tiny_config(model_type).get_text_config(decoder=True)


def test_all_that_transformers_knows_is_named() -> None:
    architectures = causal_architectures()
    assert len(architectures) > 150
    assert architectures["llama"] == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gpt_oss", ["sliding_attention", "full_attention"]),
        ("mimo_v2_flash", ["full_attention", "sliding_attention"]),
        ("qwen3", ["sliding_attention", "full_attention"]),  # its default has no window, but it can have one
        ("qwen3_next", ["linear_attention", "full_attention"]),
        ("lfm2", ["conv", "full_attention"]),
    ],
)
def test_a_layer_of_every_kind_is_kept(model_type: str, kinds: list[str]) -> None:
    config = decoder(model_type)
    assert config.layer_types == kinds
    assert config.num_hidden_layers == len(kinds)


def test_kinds_that_differ_in_anything_are_kept() -> None:
    config = decoder("exaone_moe")  # windows in some layers, experts in others
    pairs = set(zip(config.layer_types, config.mlp_layer_types, strict=True))
    assert {kind for kind, _ in pairs} == {"sliding_attention", "full_attention"}
    assert {kind for _, kind in pairs} == {"dense", "sparse"}


def test_sizes_windows_and_switches_are_small() -> None:
    config = decoder("ministral3")
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        64,
        4,
        2,
        16,
    )
    assert (config.vocab_size, config.max_position_embeddings, config.sliding_window) == (211, 256, 16)
    assert config.rope_parameters["original_max_position_embeddings"] == 64
    assert config.rope_parameters["llama_4_scaling_beta"] == 0.1


def test_heads_too_large_for_the_kernels_stay_large() -> None:
    assert decoder("gemma4").per_layer_config["full_attention"].head_dim == 512


def test_weights_follow_the_seed() -> None:
    config = tiny_config("gpt_oss")
    first, again, other = (build_random(config, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["model.layers.0.self_attn.sinks"].mean() > 0.2


def test_what_transformers_cannot_make_is_one_typed_error() -> None:
    with pytest.raises(ModelError, match=r"transformers cannot make a small never_heard_of \(ValueError"):
        tiny_config("never_heard_of")
    config = tiny_config("llama")
    config.hidden_size = -1
    with pytest.raises(ModelError, match="transformers cannot make a small llama"):
        build_random(config)
