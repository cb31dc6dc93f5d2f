"""A GGUF file becomes an ordinary model folder, once: dense weights, config, tokenizer, chat template.

Unpacking takes seconds to a minute, reading the folder a moment; so it is kept in the user's cache directory under the
content of the file and the type of the weights. A folder appears whole (by rename) or not at all.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import gguf
import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, GgufConfig

from ktransformer2.errors import ModelFileError
from ktransformer2.models.fingerprint import hash_file
from ktransformer2.models.registry import quiet_transformers
from ktransformer2.models.store import cache_directory, hash_memory, written_into
from ktransformer2.models.weight_files import check_gguf
from ktransformer2.models.weights import read_weights

# Raised when the same file would be converted into something else.
_CONVERSION_VERSION = 1


def converted(path: Path, dtype: torch.dtype) -> Path:
    """The model folder of a GGUF file. Side effect: writes it into the cache directory the first time.

    Raises ModelFileError for a file that is broken or that transformers cannot convert, ConfigError where the directory
    cannot be written.
    """
    name = f"{hash_file(path, hash_memory()).hex()[:32]}-{str(dtype).removeprefix('torch.')}-{_CONVERSION_VERSION}"
    models = cache_directory() / "gguf"
    target = models / name
    if target.is_dir():
        return target
    check_gguf(path)
    with written_into(models):
        models.mkdir(exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=models))
    try:
        _convert(path, dtype, unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _return_freed_memory()
    return target


def _return_freed_memory() -> None:
    """glibc keeps what was freed in small pieces: 440 MB after SmolLM2 in fp32, which the loaded model would come on
    top of. Other C libraries have no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses the header three times and builds a table of names per tensor; remembered, that is done once.

    SmolLM2 then takes 15 s of CPU time instead of 37. Side effect: two names of `gguf` are wrapped meanwhile.
    """
    names = ("GGUFReader", "get_tensor_name_map")
    before = [getattr(gguf, name) for name in names]
    for name, function in zip(names, before, strict=True):
        setattr(gguf, name, lru_cache(maxsize=1)(function))
    try:
        yield
    finally:
        for name, function in zip(names, before, strict=True):
            setattr(gguf, name, function)


def _convert(path: Path, dtype: torch.dtype, target: Path) -> None:
    unpacked = GgufConfig(dequantize=True)
    with _parsed_once(), quiet_transformers():
        model = read_weights(path.parent, dtype, gguf_file=path.name, quantization_config=unpacked)
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        except Exception as error:  # whatever a header that is well formed but senseless may set off in a library
            raise ModelFileError(f"{path}: its tokenizer cannot be read ({type(error).__name__}: {error})") from error
        with written_into(target.parent):
            try:
                model.save_pretrained(target)
            except SafetensorError as error:  # so the library names a disk that is full
                raise OSError(str(error)) from error
            tokenizer.save_pretrained(target)
