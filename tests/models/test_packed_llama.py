"""Packed weights in the lean runner: answers near those of dense ones, the same whatever stands beside a row, and told
before loading."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import nn

from ktransformer2 import LLM, SamplingParams
from ktransformer2.errors import ConfigError, ModelFileError, UnsupportedModelError
from ktransformer2.models import demo, weight_choice
from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.hf import HFModel
from ktransformer2.models.hollow import hollow_model
from ktransformer2.models.llama import LlamaModel
from ktransformer2.models.loading import load_model
from ktransformer2.models.outline import outline_of
from ktransformer2.models.packed_llama import PackedLlama
from ktransformer2.models.packing import packed_tensors
from tests.models.paged import PagedTexts
from tests.models.test_llama import PROMPTS, logits_of
from tests.models.test_loading import tiny_gguf
from tests.models.tiny import tiny

FORMS = ("bf16", "int8", "int4")


def packed(folder: Path, form: str, family: str = "llama", **settings: Any) -> tuple[LlamaModel, PackedLlama]:
    """A tiny model dense, and the same packed from its files."""
    model = tiny(family, **settings)
    model.save_pretrained(folder)
    hollow = hollow_model(model.config, torch.float32)
    return LlamaModel(model), PackedLlama(hollow, packed_tensors(folder, form), b"")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_answers_are_near_those_of_dense_weights(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    dense, same = packed(tmp_path, "auto", family, **settings)
    exact = logits_of(dense)
    torch.testing.assert_close(logits_of(same), exact, atol=1e-4, rtol=1e-4)
    off = {}
    for form in FORMS:
        found = logits_of(packed(tmp_path, form, family, **settings)[1])
        off[form] = float((found - exact).norm() / exact.norm())
    assert 0 < off["bf16"] < 0.05
    assert off["bf16"] < off["int8"] < 0.25
    assert off["int8"] < off["int4"] < 1.0  # random weights tell nothing of a model's; their order does


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_row_is_the_same_whatever_stands_beside_it(form: str, tmp_path: Path) -> None:
    _, model = packed(tmp_path, form)
    together = logits_of(model)
    for row, prompt in zip(together, PROMPTS, strict=True):
        alone, pieces = PagedTexts(model.geometry), PagedTexts(model.geometry)
        assert torch.equal(model.forward(alone.step([(alone.new_text(), prompt)]))[0], row)
        text = pieces.new_text()
        for start in range(0, len(prompt), 7):  # a prompt in chunks, the last one of a token or a few
            found = model.forward(pieces.step([(text, prompt[start : start + 7])]))
        torch.testing.assert_close(found[0], row, atol=1e-4, rtol=1e-4)


def test_each_form_has_a_lineage_of_its_own(model_folder: Path) -> None:
    models = [load_model(model_folder, weights=form, dtype="float32").model for form in ("dense", *FORMS)]
    assert [model.weights for model in models] == ["dense", *FORMS]
    assert len({model.fingerprint for model in models}) == 4
    assert models[2].lasting_fingerprint() == load_model(model_folder, weights="int8").model.fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_told_before_loading_is_what_is_loaded(form: str, dtype: str, model_folder: Path) -> None:
    outline = outline_of(model_folder, dtype=dtype, weights=form)
    loaded = load_model(model_folder, dtype=dtype, weights=form).model
    assert outline.footprint == ModelFootprint.of(loaded)
    assert (outline.geometry, outline.weights) == (loaded.geometry, form)
    held = sum(layer.weight_bytes for layer in _layers(loaded))
    assert loaded.weight_bytes - held == 9 * 64 * torch.empty(0, dtype=loaded.model.dtype).itemsize + 2 * 8 * 4


def _layers(model: Any) -> list[Any]:
    of_layers = [
        getattr(layer, name) for layer in model._layers for name in ("qkv", "attention_out", "gate_up", "mlp_out")
    ]
    return [*of_layers, model._head, model._table]


@pytest.mark.parametrize(("kind", "form"), [(Kind.Q4_1, "int4"), (Kind.Q4_0, "int4"), (Kind.Q8_0, "int8")])
def test_a_quantised_file_computes_with_the_codes_it_has(
    kind: Kind, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "q.gguf"
    tiny_gguf(file, kind=kind)
    monkeypatch.setattr(weight_choice, "backend_name", lambda: "native")
    dense = load_model(file, dtype="float32").model
    coded = load_model(file, dtype="float32", weights="auto").model
    assert (dense.weights, coded.weights) == ("dense", form)
    assert isinstance(coded, PackedLlama)
    every = torch.arange(40)
    assert torch.equal(coded._table.rows(every), dense.model.get_input_embeddings().get_parameter("weight"))
    prompt = [list(range(3, 30))]
    found, exact = (_last_logits(model, prompt) for model in (coded, dense))
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.05  # of rows that are coded, not of weights
    outline = outline_of(file, dtype="float32", weights="auto")
    assert (outline.weights, outline.footprint) == (form, ModelFootprint.of(coded))
    monkeypatch.setattr(weight_choice, "backend_name", lambda: "reference")  # which unpacks them for every product
    assert load_model(file, dtype="float32", weights="auto").model.weights == "dense"


def test_a_file_without_codes_stays_dense_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "f.gguf"
    tiny_gguf(file)
    assert load_model(file, weights="auto").model.weights == "dense"
    assert outline_of(file, weights="auto") == outline_of(file)
    assert load_model(file, weights="int4").model.weights == outline_of(file, weights="int4").weights == "int4"


def _last_logits(model: HFModel, prompts: list[list[int]]) -> torch.Tensor:
    texts = PagedTexts(model.geometry)
    return model.forward(texts.step([(texts.new_text(), prompt) for prompt in prompts]))


def test_no_dense_copy_is_held(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    model = tiny("llama", **sizes)
    model.save_pretrained(tmp_path)
    total, config = sum(parameter.nbytes for parameter in model.parameters()), model.config
    del model
    gc.collect()
    before = psutil.Process().memory_info().rss
    lean = PackedLlama(hollow_model(config, torch.float32), packed_tensors(tmp_path, "int8"), b"")
    logits_of(lean)
    gc.collect()
    assert lean.weight_bytes < 0.28 * total
    assert psutil.Process().memory_info().rss - before < 0.6 * total


def test_what_was_changed_cannot_compute_and_says_so(model_folder: Path) -> None:
    loaded = load_model(model_folder, weights="int4")
    assert loaded.model.up_to_date() is loaded.model
    with pytest.raises(
        UnsupportedModelError, match="modules of transformers are asked for, but the weights are packed"
    ):
        loaded.model.original_attention()
    with pytest.raises(ConfigError, match="weights='int8' comes too late: the model was loaded with 'int4'"):
        LLM(loaded, weights="int8")
    loaded.model.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="changed, by an adapter or a hook, but the weights are packed"):
        LLM(loaded)


def test_what_cannot_be_packed_is_refused_by_name_and_dense_by_itself(tmp_path: Path, model_folder: Path) -> None:
    tiny("gemma2").save_pretrained(tmp_path / "gemma2")
    demo.byte_tokenizer().save_pretrained(tmp_path / "gemma2")
    with pytest.raises(
        UnsupportedModelError, match="weights='int4' is for the lean runner, which does not compute Gem"
    ):
        load_model(tmp_path / "gemma2", weights="int4")
    with pytest.raises(UnsupportedModelError, match="does not compute Gemma2ForCausalLM"):
        outline_of(tmp_path / "gemma2", weights="int4")
    assert load_model(tmp_path / "gemma2", weights="auto").model.weights == "dense"
    assert load_model(model_folder, weights="auto").model.weights == "dense"
    with pytest.raises(ConfigError, match="runner='transformers' multiplies dense weights alone"):
        load_model(model_folder, weights="bf16", runner="transformers")
    with pytest.raises(ConfigError, match="weights='int5' is not allowed; allowed: dense, auto, bf16, int8, int4"):
        load_model(model_folder, weights="int5")
    with pytest.raises(UnsupportedModelError, match="made up and stay dense"):
        demo._from_source("random", "auto", None, weight_choice.WeightChoice("int8"))


def _without_a_norm(held: dict[str, torch.Tensor]) -> None:
    del held["model.norm.weight"]


def _of_another_shape(held: dict[str, torch.Tensor]) -> None:
    held["model.layers.1.mlp.down_proj.weight"] = torch.ones(64, 32)


def _with_a_short_norm(held: dict[str, torch.Tensor]) -> None:
    held["model.norm.weight"] = torch.ones(63)


def _with_a_bias(held: dict[str, torch.Tensor]) -> None:
    held["model.layers.0.mlp.down_proj.bias"] = torch.ones(64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_norm, "holds no model.norm.weight"),
        (_of_another_shape, r"down_proj has shape \(64, 32\), not \(64, 96\)"),
        (_with_a_short_norm, r"model.norm.weight has shape \(63,\), not \(64,\)"),
        (_with_a_bias, "down_proj.bias, which the model does not have"),
    ],
)
def test_files_that_are_not_the_models_are_refused(change: Any, message: str, model_folder: Path) -> None:
    held = load_file(model_folder / "model.safetensors")
    change(held)
    save_file(held, model_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=message):
        load_model(model_folder, weights="int8")


def test_an_answer_from_what_was_read_is_that_of_a_first_reading(model_folder: Path) -> None:
    with LLM(model_folder, weights="int8", memory="64MB", block_tokens=16) as llm:
        assert (llm.weights, llm.runner) == ("int8", "lean")
        first, again = (llm.generate([PROMPTS[0]], SamplingParams(max_new_tokens=8))[0] for _ in range(2))
    assert again.usage.cached_tokens > 0 == first.usage.cached_tokens
    assert again.token_ids == first.token_ids


def test_the_end_tokens_are_those_of_the_folder(model_folder: Path) -> None:
    found = load_model(model_folder, weights="int8").model.model.generation_config
    dense = load_model(model_folder).model.model.generation_config
    assert found is not None
    assert dense is not None
    assert found.to_diff_dict() == dense.to_diff_dict()


def test_only_hollow_modules_are_inside(model_folder: Path) -> None:
    inner: nn.Module = load_model(model_folder, weights="int8").model.model
    assert {parameter.is_meta for parameter in inner.parameters() if parameter.ndim == 2} == {True}
