"""From a name to a model that can be stepped: a folder, a hub name, a safetensors or a GGUF file.

Files are checked before transformers reads them; code that comes with a model is never run; weights that are missing
are an error, not random numbers. Knows no engine.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ktransformer2.errors import ConfigError, ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from ktransformer2.models import hub
from ktransformer2.models.fingerprint import hash_file, hash_files
from ktransformer2.models.gguf_conversion import converted
from ktransformer2.models.hf import HFModel
from ktransformer2.models.llama import LlamaModel
from ktransformer2.models.llama_fit import unfit
from ktransformer2.models.packed_llama import PackedLlama
from ktransformer2.models.probe import refuse_unservable
from ktransformer2.models.registry import quiet_transformers
from ktransformer2.models.store import hash_memory
from ktransformer2.models.weight_choice import WeightChoice
from ktransformer2.models.weight_files import PICKLED_SUFFIXES, checked_weights, weight_paths
from ktransformer2.models.weights import read_weights

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
_FAST_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer. `source` says in words where it came from."""

    model: HFModel
    tokenizer: PreTrainedTokenizerBase
    source: str


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    runner: str = "auto",
    weights: str = "dense",
    revision: str | None = None,
    offline: bool | None = None,
) -> LoadedModel:
    """Loads a model from a folder, a `.safetensors` or `.gguf` file, a hub name, or `owner/name/file.gguf` on the hub.

    `dtype`: auto (bfloat16 where the CPU computes in it, else float32), bfloat16 or float32.
    `runner`: whose forward pass a step is, see `take_in`.
    `weights`: dense, auto, bf16, int8 or int4, see `weight_choice`.
    Side effects: downloads into the hub's cache; a GGUF file is converted once into the user's cache directory.
    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, ModelError, ConfigError.
    """
    wanted, choice = chosen_dtype(dtype), WeightChoice(weights, runner)
    try:
        place = locate(str(name_or_path), revision, offline)
        folder = place if place.is_dir() else converted(place, wanted)
        model = _packed(place, folder, choice, wanted) or _dense(folder, wanted, runner)
        with quiet_transformers():
            tokenizer = _read_tokenizer(folder)
        return LoadedModel(model, tokenizer, str(name_or_path))
    except OSError as error:  # a file that may not be read, a name that is too long, a disk that fails
        raise ModelFileError(f"{str(name_or_path)[:200]}: cannot be read ({str(error)[:300]})") from error


def _packed(place: Path, folder: Path, choice: WeightChoice, dtype: torch.dtype) -> PackedLlama | None:
    """The model with packed weights; None: it is to be dense. `folder` has its config, `place` its weights."""
    if choice.weights == "dense":
        return None
    hollow = choice.hollow(read_config(folder), dtype, place)
    tensors = None if hollow is None else choice.tensors(place)
    if hollow is None or tensors is None:
        return None
    if (folder / "generation_config.json").is_file():  # which tokens end an answer
        hollow.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    memory = hash_memory()
    content = hash_files(checked_weights(place), memory) if place.is_dir() else hash_file(place, memory)
    return PackedLlama(hollow, tensors, content)


def _dense(folder: Path, dtype: torch.dtype, runner: str) -> HFModel:
    files = checked_weights(folder)
    model = read_weights(folder, dtype, config=read_config(folder))
    return take_in(model, runner, hash_files(files, hash_memory()))


def take_in(model: PreTrainedModel, runner: str = "auto", weights_hash: bytes | None = None) -> HFModel:
    """A loaded model, to be stepped by its own forward pass (`transformers`), or by the lean one of the Llama family.

    `auto`: lean where the model fits exactly. Side effects: as `HFModel` and `LlamaModel`.
    Raises: UnsupportedModelError, also where `lean` is asked for and does not fit; ConfigError for another runner.
    """
    WeightChoice(runner=runner)  # refuses a word that is no runner
    if runner == "transformers" or (runner == "auto" and unfit(model)):
        return HFModel(model, weights_hash)
    return LlamaModel(model, weights_hash)


def load_tokenizer(
    name_or_path: str | Path, *, revision: str | None = None, offline: bool | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer alone of what `load_model` loads. Side effects and errors as there."""
    place = locate(str(name_or_path), revision, offline)
    with quiet_transformers():
        return _read_tokenizer(place if place.is_dir() else converted(place, chosen_dtype("auto")))


def chosen_dtype(dtype: str) -> torch.dtype:
    """The type to compute in. Raises ConfigError; float16 is refused because CPUs emulate it."""
    if dtype == "auto":
        return torch.bfloat16 if computes_bf16() else torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(
            f"dtype={dtype!r} is not allowed; allowed: auto, {', '.join(_DTYPES)} (float16 is far too slow)"
        )
    return _DTYPES[dtype]


def computes_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512_BF16, AMX, Arm BF16); False where nothing says so."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return bool(flags) and bool(_FAST_BF16_FLAGS & set(flags[0]))


def locate(name: str, revision: str | None = None, offline: bool | None = None) -> Path:
    """The folder or GGUF file that `name` means. Side effect: downloads. Raises ModelNotFoundError, ModelError."""
    place = local_place(name)
    if place is not None:
        return place
    repo_id, file = hub_place(name)
    return hub.fetch(repo_id, revision, offline, file=file)


def local_place(name: str) -> Path | None:
    """The folder or GGUF file on this machine that `name` means; None: it is a name on the hub.

    Raises ModelNotFoundError for what is neither, ModelFileError for a file that is no model.
    """
    path = Path(name)
    if name.startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError as error:
            raise ModelNotFoundError(f"no file or folder {name!r} ({error})") from error
    if path.is_dir():
        return path
    if path.is_file():
        return _model_file(path)
    if _HUB_GGUF.fullmatch(name):
        return None
    looks_like_path = name.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors", *PICKLED_SUFFIXES)
    if looks_like_path or not _HUB_NAME.fullmatch(name):
        raise ModelNotFoundError(f"no file or folder {name!r}{_near(path)}")
    return None


def hub_place(name: str) -> tuple[str, str | None]:
    """(repository, file) of a name on the hub; without a file it is the model folder."""
    found = _HUB_GGUF.fullmatch(name)
    return (found[1], found[2]) if found else (name, None)


def _model_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return path
    if path.suffix == ".safetensors":
        names = [weights.name for weights in weight_paths(path.parent)]
        if names != [path.name]:
            raise ModelFileError(
                f"{path} is not what its folder loads as ({', '.join(names)}); name the folder, or put the file into a "
                "folder of its own, with config.json and tokenizer, as model.safetensors"
            )
        return path.parent
    why = "a pickle that could run any code" if path.suffix in PICKLED_SUFFIXES else "not a model file"
    raise ModelFileError(f"{path} is {why}; allowed: a model folder, *.safetensors, *.gguf")


def _near(path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=3)
    return f"; near: {', '.join(str(path.parent / name) for name in near)}" if near else ""


def read_config(folder: Path, **settings: Any) -> PreTrainedConfig:
    """The config of a model that can be served. `settings` go to `from_pretrained`.

    Raises UnsupportedModelError, and ModelFileError where it cannot be read or names other weights.
    """
    try:
        with quiet_transformers():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **settings
            )
    except (ValueError, KeyError) as error:  # an unknown model_type, or one whose code would have to be run
        first = str(error).strip().splitlines()[0]
        raise UnsupportedModelError(f"{folder}: transformers does not know this model ({first})") from error
    except Exception as error:  # strict configs raise their own kinds
        raise ModelFileError(f"{folder / 'config.json'}: cannot be read ({type(error).__name__}: {error})") from error
    refuse_unservable(config)
    if named := getattr(config, "transformers_weights", None):  # read instead of the files that were checked
        raise ModelFileError(
            f"{folder}: config.json names the weights {named!r} (transformers_weights); take the entry out and "
            "call the file model.safetensors"
        )
    return config


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises plain Exception for a broken file
        raise ModelError(f"{folder}: holds no tokenizer that can be read ({type(error).__name__}: {error})") from error
    return tokenizer
