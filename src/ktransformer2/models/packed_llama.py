"""The lean runner over packed weights: the pass of `llama`, its products over int8 or int4 codes, or bf16 beside fp32.

Made of a hollow model, which has the shapes and settings of a model and none of its matrices, and of the tensors of its
files: each is read once, straight into the form in which it is multiplied, so no dense copy is ever made. Norms and
biases are in the model's dtype. The embeddings are packed too; their rows are unpacked where they are looked up.

Knows no request and no block's life. Invariant: the modules of the transformers model inside never compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from transformers import PreTrainedModel

from ktransformer2.errors import ModelFileError, UnsupportedModelError
from ktransformer2.models.hf import NO_HOOK, HFModel
from ktransformer2.models.hollow import HollowArithmetic
from ktransformer2.models.llama import LlamaModel, products_of
from ktransformer2.models.model_state import model_state
from ktransformer2.models.packing import DenseLinear, PackedLinear, PackedTensors, matrix_bytes

FormOf = Callable[..., str]  # of the modules of one product
_TABLE, _HEAD = "model.embed_tokens", "lm_head"


class PackedLlama(LlamaModel):
    """A CausalModel of the Llama family whose weights stay packed. `weights`: the form of its layers.

    Side effect: norms of the hollow model are filled in.
    Raises: UnsupportedModelError for another family; ModelFileError for tensors that are not those of the model.
    """

    def __init__(self, hollow: PreTrainedModel, tensors: PackedTensors, weights_hash: bytes) -> None:
        _fill(hollow, tensors)
        products = _Packed(hollow, tensors)
        with HollowArithmetic():
            super().__init__(hollow, weights_hash, products)
        self._table = products.layer(_TABLE)
        self.weights = tensors.form_of(*products_of(0)[0])
        self.weight_bytes = packed_bytes(hollow, tensors.form_of)
        self.fingerprint = hashlib.sha256(self.fingerprint + f"packed {tensors.form}".encode()).digest()
        self._state = model_state(hollow, NO_HOOK)

    def up_to_date(self) -> HFModel:
        """Itself. Raises UnsupportedModelError where its modules were changed, since they do not compute."""
        if model_state(self.model, NO_HOOK) != self._state:
            self._refuse("its modules were changed, by an adapter or a hook")
        return self

    def original_attention(self) -> NoReturn:
        """Raises UnsupportedModelError: there is no model behind it that computes."""
        self._refuse("the modules of transformers are asked for")

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._table.rows(token_ids).to(self._embeddings.dtype)

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{why}, but the weights are packed ({self.weights}) and only the lean runner computes with them; load the "
            "model with weights='dense'"
        )


class _Packed:
    """Products with packed weights, of the shapes that the model has. Tied tables are one."""

    def __init__(self, model: PreTrainedModel, tensors: PackedTensors) -> None:
        self._model, self._tensors = model, tensors
        self._tables: dict[tuple[str, ...], PackedLinear | DenseLinear] = {}

    def layer(self, *names: str) -> PackedLinear | DenseLinear:
        """Raises ModelFileError where the files hold another shape, or biases that the model does not have."""
        names = _held(self._model, names)
        if names in self._tables:
            return self._tables[names]
        made = self._tensors.layer(*names)
        wanted = _shape(self._model, names)
        if (made.out_features, made.in_features) != wanted:
            raise ModelFileError(f"{names[0]} has shape {(made.out_features, made.in_features)}, not {wanted}")
        if names[0] in (_TABLE, _HEAD):
            self._tables[names] = made
        return made


def packed_bytes(model: PreTrainedModel, form_of: FormOf) -> int:
    """What the weights of a hollow model take, whose layers have the forms that `form_of` says."""
    vectors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
    return vectors + sum(matrix_bytes(form_of(*names), *_shape(model, names)) for names in _all_products(model))


def _all_products(model: PreTrainedModel) -> Iterator[tuple[str, ...]]:
    for layer in range(model.config.num_hidden_layers):
        yield from products_of(layer)
    yield from {_held(model, (_TABLE,)): None, _held(model, (_HEAD,)): None}


def _held(model: PreTrainedModel, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names under which the files hold the weights: a tied output is the table of embeddings."""
    return (_TABLE,) if names == (_HEAD,) and model.config.tie_word_embeddings else names


def _shape(model: PreTrainedModel, names: tuple[str, ...]) -> tuple[int, int]:
    shapes = [model.get_submodule(name).get_parameter("weight").shape for name in names]
    return sum(shape[0] for shape in shapes), shapes[0][1]


def _fill(hollow: PreTrainedModel, tensors: PackedTensors) -> None:
    """Norms and biases get the values that the files have."""
    held = dict(hollow.named_parameters())
    for name, module in hollow.named_modules():
        if isinstance(module, torch.nn.Linear) and getattr(module, "bias", None) is None and f"{name}.bias" in tensors:
            raise ModelFileError(f"the files hold {name}.bias, which the model does not have")
    with torch.no_grad():
        for name, parameter in held.items():
            if parameter.is_meta:
                continue
            values = tensors.tensor(name)
            if values.shape != parameter.shape:
                raise ModelFileError(f"{name} has shape {tuple(values.shape)}, not {tuple(parameter.shape)}")
            parameter.copy_(values)
