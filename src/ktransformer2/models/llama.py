"""The lean runner: a decoder of the Llama family on one flat batch, without transformers in its steps.

Made of a loaded transformers model, whose tensors it takes: the weights of queries, keys and values are laid behind
each other, and so are those of gate and up, so that each is one product. Rows of the new tensor are given back to the
modules they came from; so the transformers model still answers (`original_attention`), and nothing is held twice. A
layer is then four products and five calls of the kernels. The frequencies are those of the model's own rotary module.

Knows no request and no block's life. Invariant: only models of which `llama_fit.unfit` has nothing to say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from ktransformer2.errors import UnsupportedModelError
from ktransformer2.kernels.attention import paged_attention, seal
from ktransformer2.kernels.batch import AttentionParams
from ktransformer2.kernels.decoder import HeadNorms, Rotation, rms_norm, rotate_and_store, silu_multiply
from ktransformer2.layout import ModelGeometry
from ktransformer2.models.batch import FlatBatch
from ktransformer2.models.hf import NO_HOOK, HFModel
from ktransformer2.models.llama_fit import unfit
from ktransformer2.models.model_state import model_state
from ktransformer2.models.projection import DenseProjection, MakeProjection, Projection

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class _Layer:
    """One decoder layer. `place`: its layer group and page-table column."""

    place: tuple[int, int]
    attention: AttentionParams
    attention_norm: torch.Tensor
    head_norms: HeadNorms | None
    qkv: Projection
    attention_out: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    mlp_out: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.attention_out, self.gate_up, self.mlp_out


class LlamaModel(HFModel):
    """A CausalModel of the Llama family, computed by its own forward pass.

    `make_projection` decides how weights are held; where it does not keep them dense, the tensors it replaces are let
    go and the transformers model inside can answer no more.
    Side effects: as `HFModel`; the model's tensors are laid out anew.
    Raises: UnsupportedModelError for what `HFModel` refuses, and for a model that is not exactly of this family.
    """

    runner = "lean"

    def __init__(
        self,
        model: PreTrainedModel,
        weights_hash: bytes | None = None,
        make_projection: MakeProjection = DenseProjection,
    ) -> None:
        if reason := unfit(model):
            raise UnsupportedModelError(f"the lean runner does not compute {type(model).__name__}: {reason}")
        super().__init__(model, weights_hash)
        inner: Any = model.model  # transformers leaves its modules' attributes untyped
        self._eps: float = inner.norm.variance_epsilon
        self._embeddings: torch.Tensor = inner.embed_tokens.weight.detach()
        self._frequencies: torch.Tensor = inner.rotary_emb.inv_freq.float()
        self._rotary_scale: float = inner.rotary_emb.attention_scaling
        self._layers = [_layer(layer, self.geometry, make_projection) for layer in inner.layers]
        self._norm: torch.Tensor = inner.norm.weight.detach()
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # unannotated there
        self._head = _projection([head], make_projection, keep=head.weight is inner.embed_tokens.weight)
        made = [projection for layer in self._layers for projection in layer.projections] + [self._head]
        packed = [projection for projection in made if not isinstance(projection, DenseProjection)]
        self._emptied = bool(packed)
        here = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        self.weight_bytes = sum(t.nbytes for t in here) + sum(projection.weight_bytes for projection in packed)
        # Fused products need not give the bits of single ones, and packed ones do not.
        forms = sorted({type(projection).__qualname__ for projection in made})
        way = f"{self.runner} {' '.join(forms)} {self.weight_bytes}".encode()
        self.fingerprint = hashlib.sha256(self.fingerprint + way).digest()
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
            residual = embedding(batch.token_ids, self._embeddings)  # [T, hidden]
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

    @contextmanager
    def original_attention(self) -> Iterator[PreTrainedModel]:
        """As `HFModel` has it. Raises: UnsupportedModelError where the weights were packed away."""
        if self._emptied:
            raise UnsupportedModelError(
                "the weights of this model were packed; load it again with runner='transformers'"
            )
        with super().original_attention() as model:
            yield model

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


def _layer(module: Any, geometry: ModelGeometry, make: MakeProjection) -> _Layer:
    """Side effect: the module's weights become rows of the fused ones."""
    attention, mlp = module.self_attn, module.mlp
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
        qkv=_projection([attention.q_proj, attention.k_proj, attention.v_proj], make),
        attention_out=_projection([attention.o_proj], make),
        mlp_norm=module.post_attention_layernorm.weight.detach(),
        gate_up=_projection([mlp.gate_proj, mlp.up_proj], make),
        mlp_out=_projection([mlp.down_proj], make),
    )


def _projection(modules: Sequence[nn.Linear], make: MakeProjection, *, keep: bool = False) -> Projection:
    """One projection for all of `modules`. Side effect: their tensors become views of its own, or nothing at all where
    it holds them otherwise, unless others need them (`keep`)."""
    weight: torch.Tensor = modules[0].weight.detach()
    bias: torch.Tensor | None = modules[0].bias
    if len(modules) > 1:
        weight = torch.cat([module.weight.detach() for module in modules])  # [sum of outputs, in]
    if bias is not None:
        bias = torch.cat([module.bias.detach() for module in modules])
    made = make(weight, bias)
    dense, start = isinstance(made, DenseProjection), 0
    for module in () if keep else modules:
        rows = slice(start, start := start + module.out_features)
        module.weight = _parameter(weight[rows], dense)
        if bias is not None:
            module.bias = _parameter(bias[rows], dense)
    return made


def _parameter(rows: torch.Tensor, dense: bool) -> nn.Parameter:
    return nn.Parameter(rows if dense else rows.to("meta"), requires_grad=False)
