"""From a name to a model: folders, files and their defects; one typed error each."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ktransformer2.errors import ConfigError, ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from ktransformer2.models import gguf_conversion
from ktransformer2.models.loading import chosen_dtype, computes_bf16, load_model
from tests.models.paged import greedy
from tests.models.tiny import one_by_one

PROMPT = [5, 60, 7, 200, 9]


def test_a_folder_loads_with_its_tokenizer(model_folder: Path) -> None:
    loaded = load_model(model_folder, dtype="float32")
    assert loaded.source == str(model_folder)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Räume, 中文")) == "Räume, 中文"
    with loaded.model.original_attention() as bare:
        expected = one_by_one(bare, [PROMPT], 8)
    assert greedy(loaded.model, [PROMPT], 8) == expected


def test_a_safetensors_file_stands_for_its_folder(model_folder: Path) -> None:
    by_file = load_model(model_folder / "model.safetensors")
    assert by_file.model.fingerprint == load_model(model_folder).model.fingerprint


def test_a_safetensors_file_that_the_folder_does_not_load_is_refused(model_folder: Path) -> None:
    other = model_folder / "b.safetensors"
    other.write_bytes((model_folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelFileError, match=r"b\.safetensors is not what its folder loads as \(model\.safetensors\)"):
        load_model(other)
    (model_folder / "model.safetensors").unlink()
    for name in (other, model_folder):
        with pytest.raises(ModelFileError, match=r"holds b\.safetensors, but neither model\.safetensors nor"):
            load_model(name)


def test_one_of_several_shards_is_refused(model_folder: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"1.safetensors": names[:5], "2.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, model_folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"loads as \(1\.safetensors, 2\.safetensors\); name the folder"):
        load_model(model_folder / "1.safetensors")
    assert load_model(model_folder).model.vocab_size == 257


def test_files_that_transformers_does_not_read_are_neither_checked_nor_hashed(model_folder: Path) -> None:
    before = load_model(model_folder).model.fingerprint
    (model_folder / "extra.safetensors").write_bytes(b"no weights")
    (model_folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "extra.safetensors"}}')
    assert load_model(model_folder).model.fingerprint == before


def test_a_config_that_names_other_weights_is_refused(model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "b.safetensors"}))
    (model_folder / "b.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelFileError, match=r"names the weights 'b\.safetensors'"):
        load_model(model_folder)


@pytest.mark.parametrize("name", ["model.safetensors", "weights.gguf"])
def test_a_file_that_may_not_be_read_is_a_typed_error(
    name: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = model_folder / name
    locked.touch()
    really = Path.open

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> Any:  # chmod does not stop a test that runs as root
        if path == locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match="cannot be read") as caught:
        load_model(locked if name.endswith(".gguf") else model_folder)
    assert "Permission denied" in str(caught.value)


def test_a_folder_may_be_named_like_a_file(model_folder: Path, tmp_path: Path) -> None:
    folder = model_folder.rename(tmp_path / "model.gguf")
    assert load_model(folder).model.vocab_size == 257
    (tmp_path / "empty.gguf").mkdir()
    with pytest.raises(ModelFileError, match=r"holds no config\.json"):
        load_model(tmp_path / "empty.gguf")


def test_a_name_that_is_too_long_for_a_file_is_a_typed_error() -> None:
    with pytest.raises(ModelFileError, match="cannot be read") as caught:
        load_model("a" * 5000)
    assert len(str(caught.value)) < 600


def test_a_cache_directory_that_cannot_be_written_is_a_typed_error(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("KTRANSFORMER_CACHE", str(place))
        with pytest.raises(ConfigError, match=r"cache directory .*file.* cannot be written .*KTRANSFORMER_CACHE"):
            load_model(model_folder)


def test_the_fingerprint_follows_the_content_not_the_path(model_folder: Path, tmp_path: Path) -> None:
    before = load_model(model_folder).model.fingerprint
    moved = model_folder.rename(tmp_path / "elsewhere")
    assert load_model(moved).model.fingerprint == before
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    assert load_model(moved).model.fingerprint != before


def test_weights_are_read_in_the_wanted_type(model_folder: Path) -> None:
    narrow, wide = load_model(model_folder, dtype="bf16").model, load_model(model_folder, dtype="float32").model
    assert wide.weight_bytes > 1.9 * narrow.weight_bytes
    assert narrow.fingerprint != wide.fingerprint


@pytest.mark.parametrize("dtype", ["float16", "int8", ""])
def test_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="allowed: auto, bfloat16, bf16, float32, fp32"):
        chosen_dtype(dtype)


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 f16c\n", False),
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("processor : 0\nflags\t\t: fpu amx_tile amx_bf16\n", True),
        ("processor : 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("", False),
    ],
)
def test_bf16_is_chosen_where_the_cpu_multiplies_in_it(tmp_path: Path, cpuinfo: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert computes_bf16(tmp_path / "cpuinfo") is fast
    assert computes_bf16(tmp_path / "missing") is False


def test_an_unknown_path_names_near_ones(model_folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no file or folder .*; near: .*tiny-llama"):
        load_model(model_folder.with_name("tiny-lama"))
    with pytest.raises(ModelNotFoundError, match=r"near: .*model\.safetensors"):
        load_model(model_folder / "modell.safetensors")


@pytest.mark.parametrize("name", ["", "a/b/c", "no such model", "../x", "~nobody/x", "x.gguf"])
def test_what_is_no_name_at_all_asks_no_hub(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises((ModelNotFoundError, ModelFileError)):
        load_model(name)


def test_a_pickle_is_refused(model_folder: Path) -> None:
    pickled = model_folder / "pytorch_model.bin"
    pickled.write_bytes(b"\x80")
    with pytest.raises(ModelFileError, match="a pickle that could run any code"):
        load_model(pickled)


def test_missing_weights_are_an_error_not_random_numbers(model_folder: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    del weights["model.layers.2.self_attn.k_proj.weight"]
    save_file(weights, model_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"1 weights are missing .*layers\.2\.self_attn\.k_proj"):
        load_model(model_folder)


def test_weights_of_another_shape_are_an_error(model_folder: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, model_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight|cannot be loaded"):
        load_model(model_folder)


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"model_type": "never_heard_of"}, UnsupportedModelError, "does not know this model"),
        ({"model_type": "never_heard_of", "auto_map": {"AutoConfig": "x.Y"}}, UnsupportedModelError, "does not know"),
        ({"model_type": "t5"}, UnsupportedModelError, "encoder-decoder"),
        ({"model_type": "mamba"}, UnsupportedModelError, "linear_attention"),
        ({"hidden_size": "many"}, ModelFileError, r"config\.json"),
        ({"num_hidden_layers": 5}, ModelFileError, "missing"),
    ],
)
def test_a_config_that_cannot_be_served(
    model_folder: Path, change: dict[str, object], error: type[Exception], reason: str
) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=reason):
        load_model(model_folder)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00" * 10, '{"model_type": 3}'])
def test_a_broken_config_is_one_error(model_folder: Path, content: str) -> None:
    (model_folder / "config.json").write_text(content)
    with pytest.raises(ModelError):
        load_model(model_folder)


def test_a_broken_tokenizer_is_one_error(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no tokenizer that can be read"):
        load_model(model_folder)


def test_mutated_weight_headers_never_crash_the_loader(model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    good = path.read_bytes()
    header_end = 8 + int.from_bytes(good[:8], "little")
    refused = 0
    for seed in range(25):
        draw, raw = random.Random(seed), bytearray(good)
        for _ in range(3):
            raw[draw.randrange(8, header_end)] = draw.randrange(32, 127)
        path.write_bytes(raw)
        try:
            load_model(model_folder)
        except ModelFileError:
            refused += 1
    assert refused >= 20


def tiny_gguf(
    path: Path, arch: str = "llama", layers: int = 1, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> None:
    """A GGUF Llama of one layer with a byte-level tokenizer; `kind`: of matrices whose rows it divides."""
    generator = torch.Generator().manual_seed(3)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    symbols = [*(chr(33 + i) for i in range(37)), "!!", "<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(symbols)
    writer.add_token_types([1] * 38 + [3, 3])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(38)
    writer.add_eos_token_id(39)
    writer.add_chat_template("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    shapes = {
        "token_embd.weight": (40, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_gate.weight": (48, 32),
        "blk.0.ffn_up.weight": (48, 32),
        "blk.0.ffn_down.weight": (32, 48),
    }
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).numpy()
        is_coded = len(shape) == 2 and shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        if is_coded:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path)
    first = load_model(path)
    assert first.tokenizer.apply_chat_template([{"role": "user", "content": "%&"}], tokenize=False) == "<%&>"
    (folder,) = (cache_dir / "gguf").iterdir()
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(names(folder))
    monkeypatch.setattr(gguf_conversion, "_convert", None)  # a second conversion would fail
    second = load_model(path.rename(tmp_path / "renamed.gguf"))
    assert second.model.fingerprint == first.model.fingerprint
    with first.model.original_attention() as bare:
        expected = one_by_one(bare, [[1, 2, 3]], 6)
    assert greedy(second.model, [[1, 2, 3]], 6) == expected


def test_a_gguf_file_that_makes_no_sense_is_one_error_and_leaves_nothing(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path, layers=2)  # one layer is missing
    with pytest.raises(ModelFileError, match=r"layers\.1"):
        load_model(path)
    tiny_gguf(path, arch="never-heard-of")
    with pytest.raises(ModelFileError, match="never-heard-of"):
        load_model(path)
    assert names(cache_dir / "gguf") == []


def test_a_conversion_that_cannot_be_written_is_one_error_and_leaves_nothing(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path)
    cache_dir.mkdir(exist_ok=True)
    (cache_dir / "gguf").write_text("no folder")
    with pytest.raises(ConfigError, match=r"gguf cannot be written .*File exists"):
        load_model(path)
    (cache_dir / "gguf").unlink()

    def full(model: PreTrainedModel, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(ConfigError, match=r"cannot be written .*No space left on device.*make room"):
        load_model(path)
    assert names(cache_dir / "gguf") == []
