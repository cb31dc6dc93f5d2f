"""A model without weights shows the geometry of the one with weights, and refuses what that refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from ktransformer2.errors import ModelFileError, UnsupportedModelError
from ktransformer2.layout import Form
from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.hf import HFModel
from ktransformer2.models.hollow import HollowArithmetic, hollow_model
from ktransformer2.models.tiny import build_random, tiny_config
from ktransformer2.models.weights import read_weights
from tests.models.tiny import FAMILIES, tiny

DTYPES = (torch.float32, torch.bfloat16)


def taken_in(config: PreTrainedConfig, dtype: torch.dtype) -> HFModel:
    with HollowArithmetic():
        return HFModel(hollow_model(config, dtype), weights_hash=b"")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_geometry_is_that_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    """Seven of the families have windows, one has layers without rotation, four have experts."""
    tiny(family).save_pretrained(tmp_path)
    for dtype in DTYPES:
        loaded = HFModel(read_weights(tmp_path, dtype), weights_hash=b"")
        hollow = taken_in(AutoConfig.from_pretrained(tmp_path), dtype)
        assert hollow.geometry == loaded.geometry
        assert ModelFootprint.of(hollow) == ModelFootprint.of(loaded)


def test_a_hollow_model_holds_no_weights() -> None:
    """70 billion parameters, of which only vectors are real."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = AutoConfig.for_model("llama", num_hidden_layers=2, vocab_size=128_256, **sizes)
    model = hollow_model(config, torch.bfloat16)
    held = sum(p.numel() for p in model.parameters() if not p.is_meta)
    assert held == 8192 * (2 * 2 + 1)
    taken = taken_in(config, torch.bfloat16)
    assert taken.geometry.full_form == Form.BF16
    assert [(len(g.layers), g.num_kv_heads, g.k_head_size) for g in taken.geometry.groups] == [(2, 8, 128)]
    layer = 2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672 + 2 * 8192
    assert taken.weight_bytes == 2 * (2 * layer + 2 * 128_256 * 8192 + 8192) + 2 * 64 * 4  # two tables of frequencies


@pytest.mark.parametrize("model_type", ["lfm2", "bloom", "mpt", "rwkv"])
def test_what_loading_refuses_is_refused_in_the_same_words(model_type: str) -> None:
    def refusal(model: object) -> str:
        with pytest.raises(UnsupportedModelError) as caught:
            model()  # type: ignore[operator]  # one of the two lambdas below
        return str(caught.value)

    config = tiny_config(model_type)
    with_weights = refusal(lambda: HFModel(build_random(tiny_config(model_type)), weights_hash=b""))
    assert refusal(lambda: taken_in(config, torch.float32)) == with_weights


def test_a_senseless_config_is_one_error() -> None:
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4)
    config.hidden_act = "no such function"
    with pytest.raises(ModelFileError, match="a model of type llama cannot be made from its config"):
        hollow_model(config, torch.float32)


def test_the_config_stays_as_it_was() -> None:
    config = tiny_config("llama")
    before = config.to_dict()
    hollow_model(config, torch.bfloat16)
    assert config.to_dict() == before
