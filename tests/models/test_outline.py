"""What is told before loading, from headers alone: a folder, a file, shards, a GGUF file, a hub name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from ktransformer2.errors import ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.loading import load_model
from ktransformer2.models.outline import ModelOutline, outline_of
from tests.models.fake_hub import FakeHub, running
from tests.models.test_loading import tiny_gguf


def assert_loads_as_told(outline: ModelOutline, place: Path) -> None:
    loaded = load_model(place, dtype=outline.dtype).model
    assert outline.geometry == loaded.geometry
    assert outline.footprint == ModelFootprint.of(loaded)


def sharded(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {"1.safetensors": sorted(weights)[:5], "2.safetensors": sorted(weights)[5:]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_folder_and_its_file(model_folder: Path) -> None:
    outline = outline_of(model_folder, dtype="float32")
    assert (outline.source, outline.architecture, outline.dtype) == (str(model_folder), "llama", "float32")
    assert (outline.copied_bytes, outline.unpacking_bytes) == (0, 0)
    assert outline.loading_bytes == outline.footprint.weight_bytes
    assert_loads_as_told(outline, model_folder)
    by_file = outline_of(model_folder / "model.safetensors", dtype="float32")
    assert by_file.footprint == outline.footprint


def test_a_file_of_another_type_is_held_beside_the_weights_while_loading(model_folder: Path) -> None:
    outline = outline_of(model_folder, dtype="bfloat16")
    stored = sum(tensor.nbytes for tensor in load_file(model_folder / "model.safetensors").values())
    assert outline.copied_bytes == stored
    assert outline.loading_bytes == outline.footprint.weight_bytes + stored
    assert_loads_as_told(outline, model_folder)


def test_shards_are_read_by_their_headers(model_folder: Path) -> None:
    whole = outline_of(model_folder, dtype="bfloat16")
    sharded(model_folder)
    parts = outline_of(model_folder, dtype="bfloat16")
    assert parts == whole


def test_no_tokenizer_and_no_weight_is_read(model_folder: Path) -> None:
    """Sizes as promised, but the weights are holes and there is no tokenizer: loading would stumble over both."""
    expected = outline_of(model_folder)
    path = model_folder / "model.safetensors"
    size, header_bytes = path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as file:
        file.truncate(8 + header_bytes)
        file.truncate(size)
    for name in model_folder.glob("tokenizer*"):
        name.unlink()
    assert outline_of(model_folder) == expected


def test_what_loading_refuses_is_refused(model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(ModelFileError, match="truncated"):
        outline_of(model_folder)
    path.write_bytes(whole)
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(
        json.dumps(config | {"attention_chunk_size": 8, "model_type": "llama4_text"})
    )
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        outline_of(model_folder)
    with pytest.raises(ModelNotFoundError, match="no file or folder '/nowhere'"):
        outline_of("/nowhere")


def test_quantised_weights_are_not_guessed_at(model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (model_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match=r"holds quantised weights \(fp8\): what they take is known only once"
    ):
        outline_of(model_folder)


def test_a_gguf_file_is_told_by_what_its_unpacked_folder_will_hold(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path)
    outline = outline_of(path, dtype="bfloat16")
    assert not (cache_dir / "gguf").exists()
    assert outline.copied_bytes == 0
    largest = 4 * 48 * 32
    assert outline.unpacking_bytes == outline.footprint.weight_bytes + path.stat().st_size + 2 * largest
    assert_loads_as_told(outline, path)
    (folder,) = (cache_dir / "gguf").iterdir()
    unpacked = outline_of(folder, dtype="bfloat16")
    assert (unpacked.footprint, unpacked.geometry, unpacked.copied_bytes) == (outline.footprint, outline.geometry, 0)


@pytest.fixture
def hub(saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub({"lab/tiny-llama": saved_model}, gated=frozenset({"lab/secret"}))) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


def test_of_a_hub_model_only_config_and_headers_are_fetched(hub: FakeHub, saved_model: Path) -> None:
    outline = outline_of("lab/tiny-llama", dtype="bfloat16")
    there = outline_of(saved_model, dtype="bfloat16")
    assert (outline.geometry, outline.footprint, outline.loading_bytes) == (
        there.geometry,
        there.footprint,
        there.loading_bytes,
    )
    assert hub.ranges == ["bytes=0-100000"]
    assert not [path for path in hub.paths if "tokenizer" in path]


def test_a_sharded_hub_model(hub: FakeHub, model_folder: Path) -> None:
    whole = outline_of(model_folder, dtype="bfloat16")
    sharded(model_folder)
    hub.repositories["lab/sharded"] = model_folder
    assert outline_of("lab/sharded", dtype="bfloat16").loading_bytes == whole.loading_bytes
    assert hub.ranges == ["bytes=0-100000"] * 2


def test_a_hub_model_that_was_downloaded_asks_nothing(hub: FakeHub) -> None:
    load_model("lab/tiny-llama")
    asked = len(hub.paths)
    assert outline_of("lab/tiny-llama").copied_bytes == 0
    assert len(hub.paths) == asked


def test_hub_errors_are_those_of_loading(hub: FakeHub, tmp_path: Path, saved_model: Path) -> None:
    with pytest.raises(ModelError, match="is gated: accept its terms"):
        outline_of("lab/secret")
    with pytest.raises(ModelNotFoundError, match="near: lab/tiny-llama"):
        outline_of("lab/tiny-lama")
    with pytest.raises(ModelError, match="offline was asked for"):
        outline_of("lab/tiny-llama", offline=True)
    with pytest.raises(ModelError, match="of a GGUF file no part is fetched; download it first"):
        outline_of("lab/tiny-llama/x.gguf")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(saved_model / "config.json", bare)
    hub.repositories["lab/bare"] = bare
    with pytest.raises(ModelFileError, match="lab/bare: holds no safetensors; name a GGUF file"):
        outline_of("lab/bare")
