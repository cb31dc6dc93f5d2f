"""Are these weight files whole? Headers are checked before any library reads them, at a cost bounded by the file.

safetensors: 8 bytes of header length, a JSON header, then tensors without gaps. GGUF: a magic, typed key-value pairs,
tensor descriptions, then aligned tensors. Pickled weights are never opened: loading them may run any code.

Knows no model. Every defect is a ModelFileError that names the file; nothing else is ever raised for file content.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ktransformer2.errors import ModelFileError
from ktransformer2.layout import round_up

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX = "model.safetensors.index.json"
_MAX_SAFETENSORS_HEADER = 100_000_000
_SAFETENSORS_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
}
_GGUF_VERSIONS = (2, 3)
# struct codes of the fixed-size GGUF value types; 8 is a string, 9 an array.
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_MAX_GGUF_NESTING = 4
_MAX_GGUF_DIMENSIONS = 4


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, as its header describes it. `dtype` as there, such as BF16."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def stored_tensors(path: Path) -> list[StoredTensor]:
    """What a safetensors file holds, in its order; only the header is read.

    Raises ModelFileError unless the header describes exactly the bytes that are there.
    """
    size = path.stat().st_size
    if size < 8:
        raise ModelFileError(f"{path}: {size} bytes are too few for a safetensors file; download it again")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, _MAX_SAFETENSORS_HEADER):
            raise ModelFileError(
                f"{path}: the header says it has {length} bytes, the file has {size}; download it again"
            )
        header = _parse_header(path, file.read(length))
    tensors = sorted(_described(path, header))
    at = 0
    for tensor in tensors:
        if tensor.begin != at:
            raise ModelFileError(
                f"{path}: tensor {tensor.name!r} begins at byte {tensor.begin} of the data, expected {at}"
            )
        at = tensor.end
    if at != size - 8 - length:
        raise ModelFileError(
            f"{path}: the tensors need {at} bytes, the file has {size - 8 - length} (truncated?); download it again"
        )
    return tensors


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: the safetensors header cannot be read ({error}); download it again") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: the safetensors header is a {type(header).__name__}, not an object")
    return header


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _described(path: Path, header: dict[str, Any]) -> Iterator[StoredTensor]:
    """Every tensor; its shape and type agree with its bytes."""
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        entry = tensor if isinstance(tensor, dict) else {}
        kind, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        well_formed = (
            isinstance(kind, str)
            and kind in _SAFETENSORS_BYTES
            and isinstance(shape, list)
            and all(map(_is_count, shape))
            and isinstance(span, list)
            and len(span) == 2
            and all(map(_is_count, span))
        )
        if not well_formed:
            raise ModelFileError(
                f"{path}: tensor {name!r} is described as {str(tensor)[:200]}, which is not understood"
            )
        assert isinstance(kind, str)
        assert isinstance(shape, list)
        assert isinstance(span, list)
        needed = prod(shape) * _SAFETENSORS_BYTES[kind]
        if span[1] - span[0] != needed:
            raise ModelFileError(f"{path}: tensor {name!r} has bytes {span}, {kind} {shape} needs {needed}")
        yield StoredTensor(span[0], span[1], name, kind, tuple(shape))


@dataclass
class _Cursor:
    """A position in a mapped file; every read is checked against the end."""

    path: Path
    data: mmap.mmap
    at: int = 0

    def take(self, num_bytes: int) -> bytes:
        start = self.skip(num_bytes)
        return self.data[start : self.at]

    def skip(self, num_bytes: int) -> int:
        """Moves on; returns where it was."""
        start = self.at
        if num_bytes > len(self.data) - start:
            raise ModelFileError(
                f"{self.path}: the GGUF header wants {num_bytes} bytes at {start}, the file has {len(self.data)} "
                "(truncated?); download it again"
            )
        self.at = start + num_bytes
        return start

    def number(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(value)

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self.path}: a GGUF name is not text ({raw[:40]!r}); download it again") from error


def check_gguf(path: Path) -> None:
    """Raises ModelFileError unless a GGUF file's header is well formed and every tensor lies within the file."""
    if path.stat().st_size < 24:
        raise ModelFileError(f"{path}: {path.stat().st_size} bytes are too few for a GGUF file; download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        if cursor.take(4) != b"GGUF":
            raise ModelFileError(f"{path}: does not begin with GGUF; it is not a GGUF file")
        version = cursor.number("I")
        if version not in _GGUF_VERSIONS:
            raise ModelFileError(f"{path}: GGUF version {version}; versions 2 and 3 (little-endian) are read")
        num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
        if num_tensors == 0:
            raise ModelFileError(f"{path}: holds no tensor")
        alignment = _check_pairs(cursor, num_pairs)
        _check_tensors(cursor, num_tensors, alignment)


def _check_pairs(cursor: _Cursor, num_pairs: int) -> int:
    """Walks the key-value pairs; returns the alignment of the tensors in bytes."""
    alignment, seen = 32, set()
    for _ in range(num_pairs):  # every turn reads bytes, so a false count ends at the end of the file
        key, kind = cursor.text(), cursor.number("I")
        if key in seen:
            raise ModelFileError(f"{cursor.path}: key {key!r} occurs twice")
        seen.add(key)
        start = cursor.at
        _skip_value(cursor, kind, depth=0)
        if key == "general.alignment":
            if kind != 4:
                raise ModelFileError(f"{cursor.path}: general.alignment has type {kind}, expected 4 (uint32)")
            (alignment,) = struct.unpack_from("<I", cursor.data, start)
    if alignment < 8 or alignment % 8:
        raise ModelFileError(f"{cursor.path}: alignment {alignment}; multiples of 8 are allowed")
    return int(alignment)


def _skip_value(cursor: _Cursor, kind: int, depth: int) -> None:
    if kind == _GGUF_STRING:
        cursor.skip(cursor.number("Q"))
    elif kind == _GGUF_ARRAY:
        if depth == _MAX_GGUF_NESTING:
            raise ModelFileError(f"{cursor.path}: arrays are nested deeper than {_MAX_GGUF_NESTING}")
        element, count = cursor.number("I"), cursor.number("Q")
        if element in _GGUF_SCALARS:
            cursor.skip(count * struct.calcsize("<" + _GGUF_SCALARS[element]))
            return
        for _ in range(count):
            _skip_value(cursor, element, depth + 1)
    elif kind in _GGUF_SCALARS:
        cursor.skip(struct.calcsize("<" + _GGUF_SCALARS[kind]))
    else:
        raise ModelFileError(f"{cursor.path}: value type {kind} at byte {cursor.at} is not a GGUF type")


def _check_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> None:
    names: set[str] = set()
    spans: list[tuple[int, int, str]] = []
    for _ in range(num_tensors):
        name, num_dimensions = cursor.text(), cursor.number("I")
        if name in names or not 1 <= num_dimensions <= _MAX_GGUF_DIMENSIONS:
            raise ModelFileError(f"{cursor.path}: tensor {name!r} occurs twice or has {num_dimensions} dimensions")
        names.add(name)
        shape = [cursor.number("Q") for _ in range(num_dimensions)]
        kind, offset = cursor.number("I"), cursor.number("Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise ModelFileError(f"{cursor.path}: tensor {name!r} has the unknown type {kind}") from error
        if shape[0] % block or offset % alignment:
            raise ModelFileError(f"{cursor.path}: tensor {name!r} of shape {shape} at {offset} is not aligned")
        spans.append((offset, offset + prod(shape) // block * block_bytes, name))
    room = len(cursor.data) - round_up(cursor.at, alignment)
    at = 0
    for begin, end, name in sorted(spans):
        if begin < at:
            raise ModelFileError(f"{cursor.path}: tensor {name!r} lies on top of another")
        if end > room:
            raise ModelFileError(
                f"{cursor.path}: tensor {name!r} needs bytes up to {end}, the file has {max(room, 0)} (truncated?); "
                "download it again"
            )
        at = end


def checked_weights(folder: Path) -> list[Path]:
    """The safetensors files that a model folder loads, each checked. Raises ModelFileError, also for pickles alone."""
    if not (folder / "config.json").is_file():
        raise ModelFileError(f"{folder}: holds no config.json; a model folder has config.json and *.safetensors")
    weights = weight_paths(folder)
    for path in weights:
        if not path.is_file():
            raise ModelFileError(f"{path}: is named by {_INDEX} but missing; download the model again")
        stored_tensors(path)
    return weights


def weight_paths(folder: Path) -> list[Path]:
    """What transformers reads of a folder: model.safetensors, else what the index names. Raises ModelFileError."""
    whole, index = folder / "model.safetensors", folder / _INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / name for name in sorted(_indexed(index))]
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", *PICKLED_SUFFIXES))
    tensors = [name for name in others if name.endswith(".safetensors")]
    if tensors:
        raise ModelFileError(
            f"{folder}: holds {', '.join(tensors)}, but neither model.safetensors nor {_INDEX}; if the file is the "
            "whole model, call it model.safetensors"
        )
    why = f"only {others[0]}, a pickle that could run any code" if others else "no weights"
    raise ModelFileError(f"{folder}: holds {why}; convert the model to safetensors, or name a GGUF file")


def _indexed(index: Path) -> list[str]:
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
        names = [name for name in files if Path(name).name == name and name.endswith(".safetensors")]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelFileError(f"{index}: cannot be read ({error!r}); download the model again") from error
    if len(names) != len(files):
        raise ModelFileError(f"{index}: names files that are not safetensors beside it; download the model again")
    return names
