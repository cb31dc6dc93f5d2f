"""The models that are on this machine: unpacked GGUF files in the user's cache directory, and the hub's own cache.

Reads names, sizes and `config.json`, no weights. Knows no architecture: whether a model is served shows when it loads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from ktransformer2.errors import ModelError, ModelNotFoundError
from ktransformer2.models.store import cache_directory, hash_memory, read_json, written_into

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class LocalModel:
    """`name` is the hub's, else that of the file it was unpacked from. `context_tokens` None: the config names none."""

    name: str
    form: str
    num_bytes: int
    architecture: str
    context_tokens: int | None
    path: Path
    is_ours: bool


def local_models() -> list[LocalModel]:
    """Every model found, ours first. Side effect: none but making the cache directory."""
    return [*_unpacked(), *_files(), *_from_hub()]


def remove(name: str) -> LocalModel:
    """Delete a model from the cache directory, by its name or its folder's. It can be made again from its file.

    Raises: ModelNotFoundError; ModelError for one that is not this package's, or a name that means several.
    """
    found = [model for model in local_models() if name in (model.name, model.path.name, str(model.path))]
    if not found:
        raise ModelNotFoundError(f"no model {name!r} in {cache_directory()}; `ktransformer models` lists what there is")
    ours = [model for model in found if model.is_ours]
    if not ours:
        raise ModelError(f"{name} is kept by the hub's library; `hf cache rm model/{name}` removes it")
    if len(ours) > 1:
        raise ModelError(f"{name} means {len(ours)} models; name one: {', '.join(model.path.name for model in ours)}")
    (model,) = ours
    with written_into(cache_directory()):
        if model.path.is_dir():
            shutil.rmtree(model.path)
        else:
            model.path.unlink()
    return model


def _unpacked() -> Iterator[LocalModel]:
    """Folders named by the hash of a GGUF file and a dtype."""
    sources = {digest[:32]: Path(key.split("|")[0]).name for key, digest in read_json(hash_memory()).items()}
    for folder in sorted((cache_directory() / "gguf").glob("[!.]*")):
        digest, _, rest = folder.name.partition("-")
        config, dtype = read_json(folder / "config.json"), rest.rpartition("-")[0]
        name = sources.get(digest, folder.name)
        yield _model(name, f"unpacked GGUF, {dtype}", folder, config, is_ours=True)


def _files() -> Iterator[LocalModel]:
    for path in sorted(cache_directory().glob("*.gguf")):
        yield _model(path.name, "GGUF file", path, {}, is_ours=True)


def _from_hub() -> Iterator[LocalModel]:
    try:
        cached = scan_cache_dir()
    except CacheNotFound:  # nothing was ever downloaded
        return
    for repo in sorted(cached.repos, key=lambda repo: repo.repo_id):
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if repo.repo_type == "model" and newest is not None:
            config = read_json(newest.snapshot_path / "config.json")
            found = _model(repo.repo_id, "hub", newest.snapshot_path, config, is_ours=False)
            yield found


def _model(name: str, form: str, path: Path, config: dict[str, Any], *, is_ours: bool) -> LocalModel:
    inner = config.get("text_config")
    text: dict[str, Any] = inner if isinstance(inner, dict) else config
    contexts = [text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)]
    architectures = config.get("architectures") or [""]
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    num_bytes = sum(file.stat().st_size for file in files)
    return LocalModel(name, form, num_bytes, str(architectures[0]), next(iter(contexts), None), path, is_ours)
