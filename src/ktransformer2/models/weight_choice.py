"""Whether a model's weights stay packed, and in which form: what `weights` and `runner` mean together.

    dense               tensors in the dtype that is computed in, as transformers has them
    auto                the file's own codes, where it is a quantised GGUF file of the lean family; else dense
    bf16, int8, int4    that form, in the lean runner; an error for a model that it does not compute

Knows no engine. Invariant: `auto` never fails for what it cannot pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ktransformer2.errors import ConfigError, UnsupportedModelError
from ktransformer2.kernels.attention import backend_name
from ktransformer2.models.hollow import hollow_model
from ktransformer2.models.llama import products_of
from ktransformer2.models.llama_fit import misfit
from ktransformer2.models.packing import PackedTensors, packed_tensors

WEIGHTS = ("dense", "auto", "bf16", "int8", "int4")
RUNNERS = ("auto", "lean", "transformers")


@dataclass(frozen=True)
class WeightChoice:
    """What was asked for. Raises ConfigError for a word that means nothing, and for packed weights in modules that
    cannot multiply by them."""

    weights: str = "dense"
    runner: str = "auto"

    def __post_init__(self) -> None:
        for name, word, allowed in (("weights", self.weights, WEIGHTS), ("runner", self.runner, RUNNERS)):
            if word not in allowed:
                raise ConfigError(f"{name}={word!r} is not allowed; allowed: {', '.join(allowed)}")
        if self.is_named and self.runner == "transformers":
            raise ConfigError(
                f"weights={self.weights!r} is for the lean runner: runner='transformers' multiplies dense weights alone"
            )

    @property
    def is_named(self) -> bool:
        """Whether a packed form was asked for by its name."""
        return self.weights not in ("dense", "auto")

    def hollow(self, config: PreTrainedConfig, dtype: torch.dtype, place: Path | None) -> PreTrainedModel | None:
        """A model without its matrices, to be filled with packed ones; None: the weights are dense.

        `place`: the folder or GGUF file, None for a name on the hub. Raises UnsupportedModelError where a form was
        named and the model is none of the lean runner's.
        """
        may_keep_codes = place is not None and place.is_file() and backend_name() != "reference"
        if self.weights == "dense" or (self.weights == "auto" and not may_keep_codes) or self.runner == "transformers":
            return None
        model = hollow_model(config, dtype)
        reason = misfit(model)
        if reason and self.is_named:
            raise UnsupportedModelError(
                f"weights={self.weights!r} is for the lean runner, which does not compute {type(model).__name__}: "
                f"{reason}; take weights='dense'"
            )
        return None if reason else model

    def tensors(self, place: Path) -> PackedTensors | None:
        """The tensors of a model that `hollow` made; None: they are not coded, so `auto` leaves them dense.

        Raises ModelFileError; UnsupportedModelError where a form was named.
        """
        try:
            found = packed_tensors(place, self.weights)
        except UnsupportedModelError:
            if self.is_named:
                raise
            return None
        return found if self.is_named or found.form_of(*products_of(0)[0]) in ("int8", "int4") else None
