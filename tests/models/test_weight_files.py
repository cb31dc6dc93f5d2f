"""Broken, truncated and hostile weight files: one typed error each, in bounded time and memory."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from ktransformer2.errors import ModelFileError
from ktransformer2.models.weight_files import check_gguf, checked_weights, stored_tensors

MAX_CHECK_BYTES = 4_000_000


def safetensors_bytes(header: Any, num_data_bytes: int) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(num_data_bytes)


GOOD: dict[str, dict[str, Any]] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, name: {**GOOD[name], **fields}}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def _write(content: bytes, name: str = "model.safetensors") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return _write


def test_a_whole_safetensors_file_passes(write: Any) -> None:
    stored_tensors(write(safetensors_bytes(GOOD, 32)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes are too few"),
        (struct.pack("<Q", 2**63) + b"{}", "the header says it has 9223372036854775808 bytes"),
        (safetensors_bytes(GOOD, 31), "truncated"),
        (safetensors_bytes(GOOD, 33), "the tensors need 32 bytes, the file has 33"),
        (safetensors_bytes(b"{", 0), "cannot be read"),
        (safetensors_bytes(b"\xff\xfe", 0), "cannot be read"),
        (safetensors_bytes(b"[" * 200_000, 0), "cannot be read"),
        (safetensors_bytes(b'{"a":1,"a":2}', 0), "occurs twice"),
        (safetensors_bytes([], 0), "is a list"),
        (safetensors_bytes(changed("a", dtype="F31"), 32), "not understood"),
        (safetensors_bytes(changed("a", dtype=[]), 32), "not understood"),
        (safetensors_bytes(changed("a", shape=[2, -3]), 32), "not understood"),
        (safetensors_bytes(changed("a", shape=[True, 6]), 32), "not understood"),
        (safetensors_bytes(changed("a", shape=[2, 4]), 32), "needs 32"),
        (safetensors_bytes(changed("a", shape=[10**30, 10**30]), 32), "needs 4000"),
        (safetensors_bytes(changed("b", data_offsets=[16, 24]), 32), "begins at byte 16 of the data, expected 24"),
        (safetensors_bytes(changed("b", data_offsets=[32, 40]), 40), "begins at byte 32 of the data, expected 24"),
        (safetensors_bytes({"a": None}, 0), "not understood"),
    ],
)
def test_a_broken_safetensors_file_says_what_is_wrong(write: Any, content: bytes, reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason):
        stored_tensors(write(content))


def gguf_bytes(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture
def good_gguf(tmp_path: Path) -> bytes:
    return gguf_bytes(tmp_path / "good.gguf")


def test_a_whole_gguf_file_passes(write: Any, good_gguf: bytes) -> None:
    check_gguf(write(good_gguf, "model.gguf"))


def test_every_truncation_of_a_gguf_file_is_found(write: Any, good_gguf: bytes) -> None:
    # The last tensor holds 32 bytes and may be followed by padding: everything before its end is needed.
    end = good_gguf.rindex(b"\x80\x3f") + 2
    for length in (*range(0, end, 7), end - 1):
        with pytest.raises(ModelFileError, match=r"model\.gguf"):
            check_gguf(write(good_gguf[:length], "model.gguf"))
    check_gguf(write(good_gguf[:end], "model.gguf"))


def replaced(content: bytes, at: int, code: str, value: int) -> bytes:
    return content[:at] + struct.pack(code, value) + content[at + struct.calcsize(code) :]


@pytest.mark.parametrize(
    ("at", "code", "value", "reason"),
    [
        (0, "<I", 0, "not a GGUF file"),
        (4, "<I", 1, "GGUF version 1"),
        (4, ">I", 3, "GGUF version 50331648"),
        (8, "<Q", 2**63, "occurs twice"),
        (8, "<Q", 0, "no tensor"),
        (16, "<Q", 2**63, "GGUF"),
        (24, "<Q", 2**62, "truncated"),
    ],
)
def test_a_broken_gguf_header_says_what_is_wrong(
    write: Any, good_gguf: bytes, at: int, code: str, value: int, reason: str
) -> None:
    with pytest.raises(ModelFileError, match=reason):
        check_gguf(write(replaced(good_gguf, at, code, value), "model.gguf"))


def test_nested_arrays_end(write: Any, good_gguf: bytes) -> None:
    key = b"tokenizer.ggml.token_type"
    at = good_gguf.index(key) + len(key)
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10_000
    with pytest.raises(ModelFileError, match="nested deeper"):
        check_gguf(write(good_gguf[:at] + nested + good_gguf[at:], "model.gguf"))


def mutated(content: bytes, draw: random.Random, header_bytes: int) -> bytes:
    """One to four changes within the header: flipped bits, extreme numbers, cuts, doubled stretches."""
    raw = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(header_bytes, len(raw)))
        match draw.randrange(5):
            case 0:
                raw[at] ^= 1 << draw.randrange(8)
            case 1:
                raw[at] = draw.randrange(256)
            case 2:
                raw[at : at + 8] = draw.choice([b"\xff" * 8, b"\x00" * 8, struct.pack("<Q", 2**62), b"99999999"])
            case 3:
                del raw[at : at + draw.randint(1, 16)]
            case _:
                raw[at:at] = raw[at : at + draw.randint(1, 16)]
        if not raw:
            break
    return bytes(raw)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_mutated_headers_pass_or_raise_the_one_error(write: Any, good_gguf: bytes, kind: str) -> None:
    good = good_gguf if kind == "gguf" else safetensors_bytes(GOOD, 32)
    header_bytes = len(good) - (160 if kind == "gguf" else 32)
    refused = 0
    tracemalloc.start()
    try:
        for seed in range(600):
            path = write(mutated(good, random.Random(seed), header_bytes), f"model.{kind}")
            try:
                check_gguf(path) if kind == "gguf" else stored_tensors(path)
            except ModelFileError:
                refused += 1
                continue
            if kind == "safetensors":  # what we let pass, the library reads
                with safe_open(path, framework="np") as file:
                    assert all(len(file.get_slice(name).get_shape()) >= 0 for name in file.keys()), f"seed {seed}"  # noqa: SIM118
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused > 300
    assert peak < MAX_CHECK_BYTES


def test_a_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds no config\.json"):
        checked_weights(tmp_path)


def test_pickles_are_refused_unopened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="holds no weights"):
        checked_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin, a pickle that could run any code"):
        checked_weights(tmp_path)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"weight_map": {"a": ["x"]}}', "cannot be read"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not safetensors beside it"),
        ('{"weight_map": {"a": "x.bin"}}', "not safetensors beside it"),
        ('{"weight_map": {"a": "x.safetensors"}}', "is named by model.safetensors.index.json but missing"),
    ],
)
def test_a_broken_index_says_what_is_wrong(tmp_path: Path, index: str, reason: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFileError, match=reason):
        checked_weights(tmp_path)
