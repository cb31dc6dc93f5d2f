"""From files to layers: GGUF blocks bit for bit, rows in transformers' order, one typed error for what is broken."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch.nn.functional import linear

from ktransformer2.errors import ConfigError, ModelError, ModelFileError, UnsupportedModelError
from ktransformer2.kernels.linear import CodedWeights
from ktransformer2.models.gguf_weights import GgufWeights, coded, quantized
from ktransformer2.models.packing import (
    DenseLinear,
    PackedLinear,
    Packer,
    WeightMemory,
    as_form,
    packed_tensors,
    stacked,
)
from ktransformer2.models.weight_files import check_gguf

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN = 4, 2, 32, 256
LAYER = "model.layers.0"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks(kind: Kind, n: int, k: int) -> np.ndarray:
    """Blocks of any bits whose fp16 scales are finite and of both signs."""
    rng = np.random.default_rng(n + k)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (n, k // size, num_bytes), dtype=np.uint8)
    num_halves = 1 if kind in (Kind.Q8_0, Kind.Q4_0) else 2
    raw[..., : 2 * num_halves] = rng.normal(size=(n, k // size, num_halves)).astype(np.float16).view(np.uint8)
    return raw.reshape(n, -1)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q4_0])
def test_blocks_are_packed_without_a_rounding(kind: Kind) -> None:
    raw = blocks(kind, 33, 96)
    layer = Packer("auto")(coded(torch.from_numpy(raw), kind, 96))
    assert isinstance(layer, PackedLinear)
    assert layer.matrix.form == ("int8" if kind is Kind.Q8_0 else "int4")
    assert torch.equal(layer.matrix.coded_rows(torch.arange(33)).values(), torch.from_numpy(gguf.dequantize(raw, kind)))


def test_super_blocks_lose_no_more_than_a_rounding_of_their_scales() -> None:
    raw = blocks(Kind.Q4_K, 5, 512)
    weights = coded(torch.from_numpy(raw), Kind.Q4_K, 512)
    exact = torch.from_numpy(gguf.dequantize(raw, Kind.Q4_K)).double()
    scale, least = weights.scales.double().abs().repeat_interleave(32, 1).unbind(-1)
    assert weights.form == "int4"
    assert ((weights.values() - exact).abs() <= (15 * scale + least) * 2.0**-11 * 1.01 + 1e-7).all()


def test_a_layer_says_what_it_is() -> None:
    weight = normal(33, 70)
    shapes = {form: Packer(form)(weight) for form in ("auto", "bf16", "int8", "int4")}
    assert {(layer.in_features, layer.out_features) for layer in shapes.values()} == {(70, 33)}
    # 3 tiles of 3 groups: 16 outputs x 32 inputs and 16 scales of 2 bytes (int4: and as many least values).
    assert {form: layer.weight_bytes for form, layer in shapes.items()} == {
        "auto": 33 * 70 * 4,
        "bf16": 33 * 70 * 2,
        "int8": 3 * (128 + 3 * 512),
        "int4": 3 * (192 + 3 * 256),
    }
    for form, layer in shapes.items():  # a bias is read too, in fp32
        assert Packer(form)(weight, normal(33)).weight_bytes == layer.weight_bytes + 4 * 33


@pytest.mark.parametrize(
    ("form", "least", "most"), [("auto", 0, 1e-6), ("bf16", 5e-4, 0.004), ("int8", 0.002, 0.01), ("int4", 0.03, 0.12)]
)
def test_every_form_stays_near_the_weight(form: str, least: float, most: float) -> None:
    weight, bias, x = normal(48, 96), normal(48, seed=1), normal(5, 96, seed=2)
    layer = Packer(form)(weight, bias)
    exact = linear(x.double(), weight.double(), bias.double())
    error = float((layer(x).double() - exact).norm() / exact.norm())
    assert least < error < most
    half = x.bfloat16()
    torch.testing.assert_close(layer(half).float(), layer(half.float()), rtol=0.01, atol=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e10])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_weight_that_cannot_be_packed_is_refused(bad: float, form: str) -> None:
    weight = normal(4, 64)
    weight[2, 3] = bad
    with pytest.raises(ModelError, match=r"NaN or Inf|not finite"):
        Packer(form)(weight)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: auto, bf16, int8, int4"):
        Packer("int5")


def test_rows_of_several_weights_are_stacked_in_the_widest_form() -> None:
    narrow, wide, dense = quantized(normal(4, 64), "int4"), quantized(normal(2, 64, seed=1), "int8"), normal(3, 64)
    both = stacked([narrow, wide])
    assert isinstance(both, CodedWeights)
    assert (both.form, both.num_outputs) == ("int8", 6)
    assert torch.equal(both.values()[4:], wide.values())
    torch.testing.assert_close(both.values()[:4], narrow.values(), rtol=0, atol=0.02)
    mixed = stacked([dense.bfloat16(), narrow])
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed, torch.cat([dense.bfloat16().float(), narrow.values()]))
    same = stacked([narrow, narrow])
    assert isinstance(same, CodedWeights)
    assert torch.equal(same.values(), narrow.values().repeat(2, 1))
    assert as_form(narrow, "int4") is narrow


def test_memory_is_aligned_and_shared_out_once() -> None:
    memory = WeightMemory()
    pieces = [memory.take(shape) for shape in ((3, 7), (2, 64), (1, 65 * 2**20), (5, 5))]
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.nbytes) for piece in pieces)
    assert all(begin % 64 == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def llama_weights() -> dict[str, torch.Tensor]:
    """One layer of a Llama as transformers names it."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
        "mlp.down_proj": (HIDDEN, 96),
    }
    layer = {f"{LAYER}.{name}.weight": normal(*shape, seed=len(name)) for name, shape in shapes.items()}
    return {**layer, "model.embed_tokens.weight": normal(50, HIDDEN), f"{LAYER}.input_layernorm.weight": normal(HIDDEN)}


def gguf_file(path: Path, architecture: str, weights: dict[str, torch.Tensor], kinds: dict[str, Kind]) -> Path:
    """Written as llama.cpp's converter writes it: `kinds` by a part of the name, else F32."""
    names = {
        f"{LAYER}.self_attn.q_proj": "blk.0.attn_q",
        f"{LAYER}.self_attn.k_proj": "blk.0.attn_k",
        f"{LAYER}.self_attn.v_proj": "blk.0.attn_v",
        f"{LAYER}.mlp.down_proj": "blk.0.ffn_down",
        f"{LAYER}.input_layernorm": "blk.0.attn_norm",
        "model.embed_tokens": "token_embd",
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        values = weight.numpy()
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        if heads and architecture == "llama":
            halves = values.reshape(heads, 2, HEAD_SIZE // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        form = next((form for part, form in kinds.items() if part in name), Kind.F32)
        writer.add_tensor(f"{names.get(stem, stem)}.{kind}", gguf.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rows_of_a_file_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    weights = {**llama_weights(), f"{LAYER}.self_attn.q_proj.bias": normal(HEADS * HEAD_SIZE, seed=9)}
    kinds = {"q_proj.weight": Kind.Q8_0, "k_proj": Kind.Q4_1, "v_proj": Kind.F16, "embed": Kind.BF16}
    stored = GgufWeights(gguf_file(tmp_path / "m.gguf", architecture, weights, kinds))
    for name, weight in weights.items():
        kind = next((kind for part, kind in kinds.items() if part in name), Kind.F32)
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
        found = stored.weight(name)
        assert isinstance(found, CodedWeights) == (kind in (Kind.Q8_0, Kind.Q4_1)), name
        values = found.values() if isinstance(found, CodedWeights) else found.float()
        assert torch.equal(values, expected), name


def test_kinds_without_a_form_of_their_own_become_int8(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", "llama", llama_weights(), {"q_proj": Kind.Q5_0})
    found = GgufWeights(path).weight(f"{LAYER}.self_attn.q_proj.weight")
    assert isinstance(found, CodedWeights)
    assert found.form == "int8"
    torch.testing.assert_close(found.values(), llama_weights()[f"{LAYER}.self_attn.q_proj.weight"], rtol=0, atol=0.2)


def test_layers_of_a_file_in_each_form(tmp_path: Path) -> None:
    kinds = {"q_proj": Kind.Q4_1, "k_proj": Kind.Q4_1, "v_proj": Kind.Q8_0, "embed": Kind.F16}
    path = gguf_file(tmp_path / "m.gguf", "llama", llama_weights(), kinds)
    attention = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"]

    def forms(form: str) -> list[str]:
        tensors = packed_tensors(path, form)
        layers = [tensors.layer(*attention), tensors.layer(*attention[:2]), tensors.layer("model.embed_tokens")]
        return [
            layer.matrix.form if isinstance(layer, PackedLinear) else str(layer.weight.dtype).removeprefix("torch.")
            for layer in layers
        ]

    assert forms("auto") == ["int8", "int4", "float16"]
    assert forms("int8") == ["int8", "int8", "int8"]
    assert forms("int4") == ["int4", "int4", "int8"]  # the output layer keeps eight bits
    assert forms("bf16") == ["bfloat16"] * 3
    tensors = packed_tensors(path, "auto")
    norm = f"{LAYER}.input_layernorm.weight"
    assert torch.equal(tensors.tensor(norm), llama_weights()[norm])
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    with pytest.raises(ModelFileError, match="holds no lm_head"):
        tensors.layer("lm_head")


def test_layers_of_a_folder(saved_model: Path) -> None:
    tensors = packed_tensors(saved_model, "auto")
    names = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"]
    weight = torch.cat([tensors.tensor(f"{name}.weight") for name in names])
    x, layer = normal(3, weight.shape[1]), tensors.layer(*names)
    assert isinstance(layer, DenseLinear)
    torch.testing.assert_close(layer(x), linear(x, weight))
    with pytest.raises(ModelFileError, match=r"holds no model\.layers\.9"):
        tensors.layer("model.layers.9.mlp.up_proj")


def test_a_bias_goes_with_its_rows_and_not_with_half_of_them(tmp_path: Path) -> None:
    weights = {**llama_weights(), f"{LAYER}.self_attn.q_proj.bias": normal(HEADS * HEAD_SIZE, seed=9)}
    tensors = packed_tensors(gguf_file(tmp_path / "m.gguf", "llama", weights, {}), "auto")
    query = f"{LAYER}.self_attn.q_proj"
    found = tensors.layer(query)(torch.zeros(1, HIDDEN))
    assert torch.equal(found[0], weights[f"{query}.bias"])
    with pytest.raises(ModelFileError, match=r"only model\.layers\.0\.self_attn\.q_proj have a bias"):
        tensors.layer(query, f"{LAYER}.self_attn.k_proj")


def test_other_families_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'gpt2'; weights are packed for llama, qwen2, qwen3"):
        GgufWeights(gguf_file(tmp_path / "a.gguf", "gpt2", llama_weights(), {}))
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ffn_gate_exps\.weight' belongs to no plain model"):
        GgufWeights(gguf_file(tmp_path / "b.gguf", "llama", {"blk.0.ffn_gate_exps.weight": normal(4, 4)}, {}))


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path) -> None:
    weights = {f"{LAYER}.self_attn.q_proj.weight": normal(HEADS * HEAD_SIZE, HIDDEN)}
    path = gguf_file(tmp_path / "m.gguf", "llama", weights, {})
    raw = bytearray(path.read_bytes())
    at = raw.index(b"llama.attention.head_count") + len(b"llama.attention.head_count") + 4
    raw[at : at + 4] = (3).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(ModelFileError, match="128 rows, which 3 heads do not divide"):
        GgufWeights(path).weight(f"{LAYER}.self_attn.q_proj.weight")


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", "llama", llama_weights(), {"down": Kind.Q4_1})
    name = f"{LAYER}.mlp.down_proj.weight"
    good = gguf.quantize(llama_weights()[name].numpy(), Kind.Q4_1).tobytes()
    path.write_bytes(path.read_bytes().replace(good, b"\x00\x7c" + good[2:]))
    with pytest.raises(ModelFileError, match=r"down_proj\.weight: has scales that are not finite"):
        GgufWeights(path).weight(name)


def test_a_spoilt_file_is_one_typed_error_or_still_a_file(tmp_path: Path) -> None:
    whole = gguf_file(tmp_path / "m.gguf", "llama", llama_weights(), {"proj": Kind.Q8_0}).read_bytes()
    path, rng, refused = tmp_path / "spoilt.gguf", random.Random(5), 0
    names = list(llama_weights())
    header = whole.index(b"rope_freqs")
    for attempt in range(60):
        raw = bytearray(whole)
        if attempt % 2:
            raw = raw[: rng.randrange(len(raw))]
        else:
            raw[rng.randrange(header + 400)] = rng.randrange(256)
        path.write_bytes(raw)
        try:
            stored = GgufWeights(path)
            for name in names:
                stored.weight(name)
        except (ModelFileError, UnsupportedModelError):
            refused += 1
        else:
            check_gguf(path)
    assert refused >= 25
