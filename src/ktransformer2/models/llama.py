"""The lean runner: a decoder of the Llama family on one flat batch, without transformers in its steps.

Made of a loaded transformers model, whose tensors it takes: the weights of queries, keys and values are laid behind
each other, and so are those of gate and up, so that each is one product. Rows of the new tensor are given back to the
modules they came from; so the transformers model still answers (`original_attention`), and nothing is held twice. A
layer is then four products and five calls of the kernels. The frequencies are those of the model's own rotary module.

Knows no request and no block's life. Invariant: only models of which `llama_fit.unfit` has nothing to say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from ktransformer2.errors import UnsupportedModelError
from ktransformer2.kernels.attention import paged_attention, seal
from ktransformer2.kernels.batch import AttentionParams
from ktransformer2.kernels.decoder import HeadNorms, Rotation, rms_norm, rotate_and_store, silu_multiply
from ktransformer2.layout import ModelGeometry
from ktransformer2.memory.mapping import MappedFiles
from ktransformer2.models.batch import FlatBatch
from ktransformer2.models.hf import NO_HOOK, HFModel
from ktransformer2.models.llama_fit import misfit, unfit
from ktransformer2.models.model_state import model_state

Product = Callable[[torch.Tensor], torch.Tensor]  # [T, in] -> [T, out]


class Products(Protocol):
    """Where the lean pass gets its products from."""

    def layer(self, *names: str) -> Product:
        """The product with the weights of these modules one under the other, and their biases."""
        ...


@dataclass(frozen=True)
class _Projection:
    """A weight [out, in] of one module, or of several one under the other, and their biases [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Layer:
    """One decoder layer. `place`: its layer group and page-table column."""

    place: tuple[int, int]
    attention: AttentionParams
    attention_norm: torch.Tensor
    head_norms: HeadNorms | None
    qkv: Product
    attention_out: Product
    mlp_norm: torch.Tensor
    gate_up: Product
    mlp_out: Product


class LlamaModel(HFModel):
    """A CausalModel of the Llama family, computed by its own forward pass.

    Side effects: as `HFModel`; the model's tensors are laid out anew.
    Raises: UnsupportedModelError for what `HFModel` refuses, and for a model that is not exactly of this family.
    """

    runner = "lean"

    def __init__(
        self, model: PreTrainedModel, weights_hash: bytes | None = None, products: Products | None = None
    ) -> None:
        """`products`: of a hollow model, whose matrices lie elsewhere; None: of the model's own tensors."""
        if reason := (unfit if products is None else misfit)(model):
            raise UnsupportedModelError(f"the lean runner does not compute {type(model).__name__}: {reason}")
        super().__init__(model, weights_hash)
        inner: Any = model.model  # transformers leaves its modules' attributes untyped
        self._eps: float = inner.norm.variance_epsilon
        self._embeddings: torch.Tensor = inner.embed_tokens.weight.detach()
        self._frequencies: torch.Tensor = inner.rotary_emb.inv_freq.float()
        self._rotary_scale: float = inner.rotary_emb.attention_scaling
        source = _OwnTensors(model) if products is None else products
        self._layers = [_layer(layer, self.geometry, source) for layer in inner.layers]
        self._norm: torch.Tensor = inner.norm.weight.detach()
        self._head = source.layer("lm_head")
        # Fused products need not give the bits of single ones.
        self.fingerprint = hashlib.sha256(self.fingerprint + self.runner.encode()).digest()
        self._state = model_state(model, NO_HOOK)

    def up_to_date(self) -> HFModel:
        """As `HFModel` has it: the lean pass knows no adapter and no hook, so a changed one runs by its own modules."""
        if model_state(self.model, NO_HOOK) == self._state:
            return self
        changed = HFModel(self.model)
        changed._own_attention = self._own_attention
        return changed

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """Logits fp32 [N, vocab_size] of `batch.logit_rows`. Side effect: K and V are stored in every layer."""
        with torch.inference_mode():
            rotation = self._rotation(batch.positions)
            residual = self._embedded(batch.token_ids)  # [T, hidden]
            x = rms_norm(residual, self._layers[0].attention_norm, self._eps)
            for layer, after in pairwise([*self._layers, None]):
                assert layer is not None, "only what comes after the last layer is None"
                x = _attention(layer, x, batch, rotation)
                if after is None:  # what follows concerns the rows alone whose logits are wanted
                    x, residual = x[batch.logit_rows], residual[batch.logit_rows]
                x = rms_norm(layer.attention_out(x), layer.mlp_norm, self._eps, residual)
                x = layer.mlp_out(silu_multiply(layer.gate_up(x)))
                x = rms_norm(x, self._norm if after is None else after.attention_norm, self._eps, residual)
            return self._head(x).float()  # [N, vocab]

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        return embedding(token_ids, self._embeddings)

    def _rotation(self, positions: torch.Tensor) -> Rotation:
        angles = positions.float().unsqueeze(1) * self._frequencies  # [T, D/2]
        cosines, sines = angles.cos(), angles.sin()
        if self._rotary_scale != 1:
            cosines, sines = cosines.mul_(self._rotary_scale), sines.mul_(self._rotary_scale)
        if (dtype := self._embeddings.dtype) != torch.float32:
            cosines, sines = cosines.to(dtype).float(), sines.to(dtype).float()
        return Rotation(cosines, sines)


def _attention(layer: _Layer, x: torch.Tensor, batch: FlatBatch, rotation: Rotation) -> torch.Tensor:
    """Normed rows [T, hidden] -> what the heads have found, [T, H * D]."""
    group, column = layer.place
    kv = batch.kv[group]
    g, size = kv.group.num_kv_heads, kv.group.k_head_size
    heads = layer.qkv(x).view(x.shape[0], -1, size)  # [T, H + 2 G, D]
    q, k, v = heads.split_with_sizes((heads.shape[1] - 2 * g, g, g), dim=1)
    rotate_and_store((q, k, v), kv, column, rotation, layer.head_norms)
    if kv.seals.shape[0]:
        seal(k, v, kv, column)
    return paged_attention(q, k, v, kv, column, layer.attention).flatten(1)


def products_of(layer: int) -> tuple[tuple[str, ...], ...]:
    """The modules of each product of a layer: queries, keys and values; attention's out; gate and up; the MLP's out."""
    at = f"model.layers.{layer}"
    qkv = (f"{at}.self_attn.q_proj", f"{at}.self_attn.k_proj", f"{at}.self_attn.v_proj")
    return qkv, (f"{at}.self_attn.o_proj",), (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"), (f"{at}.mlp.down_proj",)


def _layer(module: Any, geometry: ModelGeometry, source: Products) -> _Layer:
    attention = module.self_attn
    qkv, attention_out, gate_up, mlp_out = products_of(attention.layer_idx)
    group, column = geometry.layer_place[attention.layer_idx]
    norms = None
    if (q_norm := getattr(attention, "q_norm", None)) is not None:
        k_norm = attention.k_norm
        norms = HeadNorms(q_norm.weight.detach(), k_norm.weight.detach(), q_norm.variance_epsilon)
    return _Layer(
        place=(group, column),
        attention=AttentionParams(
            scale=attention.scaling, window=geometry.groups[group].window, rope=geometry.rope[group]
        ),
        attention_norm=module.input_layernorm.weight.detach(),
        head_norms=norms,
        qkv=source.layer(*qkv),
        attention_out=source.layer(*attention_out),
        mlp_norm=module.post_attention_layernorm.weight.detach(),
        gate_up=source.layer(*gate_up),
        mlp_out=source.layer(*mlp_out),
    )


class _OwnTensors:
    """Products with the tensors of the model's own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._files = model, MappedFiles()

    def layer(self, *names: str) -> _Projection:
        """Side effect: the tensors of several modules become rows of one, and the pages of files that held them are let
        go."""
        modules: list[Any] = [self._model.get_submodule(name) for name in names]
        weight: torch.Tensor = modules[0].weight.detach()
        bias = None if modules[0].bias is None else modules[0].bias.detach()
        if len(modules) == 1:
            return _Projection(weight, bias)
        weight = torch.cat([module.weight.detach() for module in modules])  # [sum of outputs, in]
        if bias is not None:
            bias = torch.cat([module.bias.detach() for module in modules])
        start = 0
        for module in modules:
            rows = slice(start, start := start + module.out_features)
            self._files.forget(module.weight.data_ptr(), module.weight.nbytes)
            module.weight = nn.Parameter(weight[rows], requires_grad=False)
            if bias is not None:
                module.bias = nn.Parameter(bias[rows], requires_grad=False)
        return _Projection(weight, bias)
