"""What is known of a model before it is loaded: from config and the headers of its weight files, nothing else.

A folder, a file, an unpacked GGUF or a hub name, as `load_model` takes them. Of a hub model config.json and the headers
of its safetensors are fetched; no weight, no tokenizer. The geometry is that of the loaded model: the same code watches
a hollow model of the same config, and refuses what loading would refuse, in the same words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from ktransformer2.errors import ModelError, ModelFileError, UnsupportedModelError
from ktransformer2.layout import ModelGeometry
from ktransformer2.models import hub
from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.hf import HFModel
from ktransformer2.models.hollow import HollowArithmetic, hollow_model
from ktransformer2.models.llama import products_of
from ktransformer2.models.loading import chosen_dtype, hub_place, local_place, read_config
from ktransformer2.models.packed_llama import FormOf, packed_bytes
from ktransformer2.models.packing import form_among
from ktransformer2.models.weight_choice import WeightChoice
from ktransformer2.models.weight_files import StoredTensor, check_gguf, checked_weights, stored_tensors, weight_paths

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
# Unpacking a GGUF file: a tensor is unpacked in fp32 and copied once.
_UNPACKED_COPIES, _UNPACKED_ELEMENT_BYTES = 2, 4
# Packing: the largest matrix in fp32, and its codes beside their tiles.
_PACKING_COPIES = 2


@dataclass(frozen=True)
class ModelOutline:
    """`copied_bytes`: what loading reads and converts, mapped beside the weights until it is done. `unpacking_bytes`:
    what the first load of a GGUF file takes at once to unpack it, weights included; 0: there is nothing to unpack.
    `weights`: the form of the layers.
    """

    source: str
    architecture: str
    dtype: str
    geometry: ModelGeometry
    footprint: ModelFootprint
    copied_bytes: int = 0
    unpacking_bytes: int = 0
    weights: str = "dense"

    @property
    def loading_bytes(self) -> int:
        """The most that loading holds: the weights, and what they are made from."""
        return self.footprint.weight_bytes + self.copied_bytes


def outline_of(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    weights: str = "dense",
    runner: str = "auto",
    revision: str | None = None,
    offline: bool | None = None,
) -> ModelOutline:
    """Side effect for a hub name: fetches its config. Raises what `load_model` raises for config and headers."""
    wanted, name, choice = chosen_dtype(dtype), str(name_or_path), WeightChoice(weights, runner)
    try:
        place = local_place(name) or _downloaded(name, revision)
        if place is None:
            dense, config = _on_the_hub(name, wanted, revision, offline)
        elif place.is_dir():
            config = read_config(place)
            dense = _outline(name, config, wanted, [t for path in checked_weights(place) for t in stored_tensors(path)])
        else:
            check_gguf(place)
            config = read_config(place.parent, gguf_file=place.name)
            dense = _outline(name, config, wanted, gguf_bytes=place.stat().st_size)
        return _packed(dense, choice, config, place)
    except OSError as error:
        raise ModelFileError(f"{name[:200]}: cannot be read ({str(error)[:300]})") from error


def _packed(dense: ModelOutline, choice: WeightChoice, config: PreTrainedConfig, place: Path | None) -> ModelOutline:
    """The outline with packed weights, where they are to be packed."""
    hollow = choice.hollow(config, getattr(torch, dense.dtype), place)
    if hollow is None:
        return dense
    form_of: FormOf
    if place is None:  # files of the hub hold no codes
        form_of = partial(form_among, choice.weights, lambda _: "bf16")
    elif (tensors := choice.tensors(place)) is None:
        return dense
    else:
        form_of = tensors.form_of
    footprint = dataclasses.replace(dense.footprint, weight_bytes=packed_bytes(hollow, form_of))
    largest = max(parameter.numel() for parameter in hollow.parameters())
    return dataclasses.replace(
        dense,
        footprint=footprint,
        copied_bytes=_PACKING_COPIES * _UNPACKED_ELEMENT_BYTES * largest,
        weights=form_of(*products_of(0)[0]),
    )


def _downloaded(name: str, revision: str | None) -> Path | None:
    """A hub model that was downloaded before, whole; None: it was not."""
    repo_id, file = hub_place(name)
    try:
        place = hub.fetch(repo_id, revision, offline=True, file=file)
        whole = place.is_file() or all(path.is_file() for path in weight_paths(place))
    except ModelError:  # none of it, or only its config
        return None
    return place if whole else None


def _on_the_hub(
    name: str, dtype: torch.dtype, revision: str | None, offline: bool | None
) -> tuple[ModelOutline, PreTrainedConfig]:
    repo_id, file = hub_place(name)
    if file is not None:
        raise ModelError(f"{name} is not on this machine, and of a GGUF file no part is fetched; download it first")
    folder = hub.fetch(repo_id, revision, offline, file="config.json").parent
    config = read_config(folder)
    return _outline(name, config, dtype, hub.stored_tensors(repo_id, revision)), config


def _outline(
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    stored: Iterable[StoredTensor] = (),
    gguf_bytes: int = 0,
) -> ModelOutline:
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else type(quantized).__name__
        raise UnsupportedModelError(
            f"{name} holds quantised weights ({method}): what they take is known only once they are loaded"
        )
    inner = hollow_model(config, dtype)
    with HollowArithmetic():
        model = HFModel(inner, weights_hash=b"")
    shapes = {(_NAMES.get(p.dtype), tuple(p.shape)) for p in (*inner.parameters(), *inner.buffers())}
    copied = sum(t.num_bytes for t in stored if (t.dtype, t.shape) not in shapes)
    largest = max(parameter.numel() for parameter in inner.parameters())
    unpacking = model.weight_bytes + gguf_bytes + _UNPACKED_COPIES * _UNPACKED_ELEMENT_BYTES * largest
    return ModelOutline(
        source=name,
        architecture=config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        geometry=model.geometry,
        footprint=ModelFootprint.of(model),
        copied_bytes=copied,
        unpacking_bytes=unpacking if gguf_bytes else 0,
    )
