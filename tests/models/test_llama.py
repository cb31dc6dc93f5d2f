"""The lean runner answers as transformers does; what is not exactly its family goes to the transformers path."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ktransformer2.errors import ConfigError, UnsupportedModelError
from ktransformer2.models.hf import HFModel
from ktransformer2.models.llama import LlamaModel
from ktransformer2.models.llama_fit import unfit
from ktransformer2.models.loading import take_in
from ktransformer2.models.weights import read_weights
from tests.models.paged import PagedTexts, greedy
from tests.models.tiny import one_by_one, tiny

# Longer than the window of 12, longer than a block of 16, and shorter than both.
PROMPTS = [list(range(3, 44)), [7, 100, 12, 5, 9], [(i * 37) % 200 + 2 for i in range(19)]]
_ROPE = {"rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 24}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", **_ROPE}}),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **_ROPE, "original_max_position_embeddings": 64}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                **_ROPE,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),  # biases of Q, K and V; windows in two of four layers
    "qwen3": ("qwen3", {}),  # Q and K are normed
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
}


def logits_of(model: HFModel) -> torch.Tensor:
    """Of the three prompts, read in one ragged step."""
    texts = PagedTexts(model.geometry)
    return model.forward(texts.step([(texts.new_text(), prompt) for prompt in PROMPTS]))


@pytest.mark.parametrize("name", MODELS)
def test_answers_and_logits_are_those_of_transformers(name: str) -> None:
    family, settings = MODELS[name]
    expected = one_by_one(tiny(family, **settings), PROMPTS, 12)
    by_transformers = logits_of(HFModel(tiny(family, **settings)))
    lean = take_in(tiny(family, **settings))
    assert isinstance(lean, LlamaModel)
    torch.testing.assert_close(logits_of(lean), by_transformers, atol=1e-4, rtol=1e-4)
    assert greedy(lean, PROMPTS, 12) == expected
    with lean.original_attention() as bare:  # the model that the tensors came from reads them in their new place
        assert one_by_one(bare, PROMPTS[1:2], 12) == expected[1:2]


def test_a_model_that_was_changed_runs_by_its_own_modules() -> None:
    lean = take_in(tiny("llama"))
    assert lean.up_to_date() is lean
    before = logits_of(lean)
    lean.model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: out + 1.0)
    now = lean.up_to_date()
    assert (now.runner, type(now)) == ("transformers", HFModel)
    assert not torch.allclose(logits_of(now), before, atol=0.1)
    assert now.plain_attention_name == lean.plain_attention_name == "eager"


@pytest.mark.parametrize("name", ["llama", "biases", "qwen2", "qwen3"])
def test_bf16_rounds_where_transformers_does(name: str) -> None:
    family, settings = MODELS[name]
    model = tiny(family, dtype=torch.bfloat16, **settings)
    by_transformers = logits_of(HFModel(model))
    exact = logits_of(HFModel(tiny(family, **settings)))
    lean = logits_of(LlamaModel(model))
    assert lean.dtype == torch.float32
    # Beside the distance that bf16 itself has from fp32, that of the two runners is small.
    assert (lean - by_transformers).norm() < 0.5 * (by_transformers - exact).norm()


def test_only_the_rows_that_are_asked_for_have_logits() -> None:
    lean = LlamaModel(tiny("llama"))
    texts = PagedTexts(lean.geometry)
    batch = texts.step([(texts.new_text(), PROMPTS[0])])
    every = lean.forward(replace(batch, logit_rows=torch.arange(41)))
    assert lean.forward(replace(batch, logit_rows=batch.logit_rows[:0])).shape == (0, 211)
    found = lean.forward(replace(batch, logit_rows=torch.tensor([40, 3])))
    torch.testing.assert_close(found, every[[40, 3]], atol=1e-5, rtol=1e-5)


def test_each_runner_has_a_lineage_of_its_own() -> None:
    by_transformers, lean = HFModel(tiny("llama")), LlamaModel(tiny("llama"))
    assert lean.geometry == by_transformers.geometry
    assert lean.weight_bytes == by_transformers.weight_bytes
    assert lean.fingerprint != by_transformers.fingerprint
    assert lean.fingerprint == LlamaModel(tiny("llama")).fingerprint


def test_fused_tensors_are_those_of_the_modules_and_nothing_is_held_twice(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    tiny("llama", **sizes).save_pretrained(tmp_path)
    gc.collect()
    before = psutil.Process().memory_info().rss
    model: Any = read_weights(tmp_path, torch.float32)  # its tensors are the mapped file
    total = sum(parameter.nbytes for parameter in model.parameters())
    lean = LlamaModel(model, weights_hash=b"")
    exact = logits_of(lean)  # reads every weight
    layer = model.model.layers[0]
    fused: Any = lean._layers[0].qkv
    assert layer.self_attn.q_proj.weight.data_ptr() == fused.weight.data_ptr()
    assert layer.self_attn.k_proj.weight.data_ptr() == fused.weight[512:].data_ptr()
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 1.3 * total
    torch.testing.assert_close(exact, logits_of(HFModel(read_weights(tmp_path, torch.float32))), atol=1e-4, rtol=1e-4)


def _hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def _patched(model: Any) -> None:
    model.model.norm.forward = lambda x: x


def _replaced(model: Any) -> None:
    class Adapted(nn.Linear):
        pass

    model.model.layers[2].mlp.up_proj = Adapted(64, 96)


def _regated(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _half_biased(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.bias = nn.Parameter(torch.ones(32))


def _mixed(model: Any) -> None:
    model.model.norm.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "settings", "change", "reason"),
    [
        ("gemma2", {}, None, "Gemma2ForCausalLM is none of"),
        ("mixtral", {}, None, "MixtralForCausalLM is none of"),
        ("llama", {"hidden_act": "gelu"}, None, "hidden_act=gelu"),
        ("llama", {"pretraining_tp": 2}, None, "pretraining_tp=2"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", **_ROPE}}, None, "rope dynamic"),
        ("llama", {}, _hooked, "layers.1.mlp was given another forward pass"),
        ("llama", {}, _patched, "model.norm was given another forward pass"),
        ("llama", {}, _replaced, "layers.2.mlp.up_proj is a Adapted"),
        ("llama", {}, _regated, "layers.0.mlp.act_fn is a GELU"),
        ("llama", {}, _half_biased, "some projections that are fused have a bias"),
        ("llama", {}, _mixed, "its weights are torch.bfloat16, torch.float32"),
    ],
)
def test_what_is_unusual_is_left_to_transformers(
    family: str, settings: dict[str, Any], change: Callable[[Any], None] | None, reason: str
) -> None:
    model = tiny(family, **settings)
    assert unfit(tiny("llama")) == ""
    if change is not None:
        change(model)
    assert reason in unfit(model)
    with pytest.raises(UnsupportedModelError, match="the lean runner does not compute"):
        take_in(model, "lean")


def test_a_hook_for_all_modules_is_unusual_too() -> None:
    model = tiny("llama")
    handle = register_module_forward_hook(lambda _module, _args, _out: None)
    try:
        assert unfit(model) == "a hook was registered for all modules"
    finally:
        handle.remove()


def test_the_runner_is_chosen_by_what_fits_and_by_what_is_asked() -> None:
    assert take_in(tiny("llama")).runner == "lean"
    assert take_in(tiny("llama"), "transformers").runner == "transformers"
    assert take_in(tiny("gemma2")).runner == "transformers"
    with pytest.raises(ConfigError, match="runner='fast' is not allowed; allowed: auto, lean, transformers"):
        take_in(tiny("llama"), "fast")
