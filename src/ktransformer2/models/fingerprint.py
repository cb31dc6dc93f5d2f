"""What decides the bytes of a key or value, as one hash. Blocks of another fingerprint are never read.

Weights are named by the content of their files where they came from files (hashing 500 MB takes about a second, so the
result is remembered by path, size and time), else by the tensors themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ktransformer2.layout import NUMERICS_VERSION, ModelGeometry
from ktransformer2.models.model_state import arrangement
from ktransformer2.models.store import read_json, write_atomically

_MAX_REMEMBERED = 1000
# Says where a config came from and how it is run, not what the model computes.
_NOT_NUMERICS = ("_name_or_path", "transformers_version", "use_cache", "architectures", "_attn_implementation")


def hash_file(path: Path, memory: Path | None = None) -> bytes:
    """SHA-256 of a file. `memory` is a JSON file that remembers hashes by path, size and time; broken: empty."""
    status = path.stat()
    key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    known = read_json(memory) if memory else {}
    found = known.get(key)
    if isinstance(found, str) and len(found) == 64:
        return bytes.fromhex(found)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    if memory:
        kept = list(known.items())[-(_MAX_REMEMBERED - 1) :]
        write_atomically(memory, json.dumps({**dict(kept), key: digest.hex()}).encode())
    return digest


def hash_files(paths: Sequence[Path], memory: Path | None = None) -> bytes:
    """One hash over the contents of several files; names count, folders do not."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda p: p.name):
        total.update(path.name.encode() + b"\0" + hash_file(path, memory))
    return total.digest()


def hash_tensors(model: PreTrainedModel) -> bytes:
    """One hash over every parameter and buffer by name, type, shape and bytes, and over who uses them how."""
    total = hashlib.sha256(arrangement(model).encode())
    tensors = {**model.state_dict(), **dict(model.named_buffers())}  # rotary frequencies are in the latter only
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.numel():
            total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.digest()


def fingerprint(config: PreTrainedConfig, geometry: ModelGeometry, dtype: torch.dtype, weights: bytes) -> bytes:
    """SHA-256 over everything that decides what a key or value is."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _NOT_NUMERICS}
    parts = {
        "config": settings,
        "rope": [repr(rope) for rope in geometry.rope],
        "groups": [repr(group) for group in geometry.groups],
        "dtype": str(dtype),
        "weights": weights.hex(),
        "numerics": NUMERICS_VERSION,
        # Another version may compute otherwise, and blocks outlive the process that had this one.
        "libraries": [transformers.__version__, torch.__version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()
