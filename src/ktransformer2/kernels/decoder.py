"""The door to a decoder's arithmetic between its projections: norm, rotation with the store of K and V, gate.

Backends as in `attention`, which chooses. Rounding is that of transformers' own modules: what those leave as a tensor
of the model's dtype is rounded to it here too. Knows no layer and no weight's file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktransformer2.kernels.attention import backend, check_rows
from ktransformer2.kernels.batch import KVBatch


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of one step: `cosines` and `sines` fp32 [T, D/2]; channel i is turned with i + D/2.

    In bf16 their values are such that bf16 holds them.
    """

    cosines: torch.Tensor
    sines: torch.Tensor


@dataclass(frozen=True)
class HeadNorms:
    """Queries and keys are normed head by head before they are rotated; weights [D]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of x [T, D], divided by their root mean square and multiplied by weight [D].

    Side effect: with a `residual` [T, D], x is added to it in place, and the sum is what is normed.
    """
    assert x.is_contiguous(), f"x is not contiguous, its strides are {x.stride()}"
    assert x.shape[1:] == weight.shape, f"x has shape {tuple(x.shape)}, the weight {tuple(weight.shape)}"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    assert weight.is_contiguous(), f"the weight is not contiguous, its stride is {weight.stride()}"
    if residual is not None:
        assert residual.is_contiguous(), f"residual is not contiguous, its strides are {residual.stride()}"
        assert residual.shape == x.shape, f"residual has shape {tuple(residual.shape)}, x has {tuple(x.shape)}"
        assert residual.dtype == x.dtype, f"residual is {residual.dtype}, x is {x.dtype}"
    out: torch.Tensor = backend().rms_norm(x, weight, eps, residual)
    return out


def rotate_and_store(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: KVBatch,
    column: int,
    rotation: Rotation,
    norms: HeadNorms | None = None,
) -> None:
    """Turns q [T, H, D] and k [T, G, D], then stores k and v [T, G, D] as `attention.store_kv` does.

    Side effects: q and k are rotated where they lie, after their norms where there are any.
    """
    q, k, v = qkv
    check_rows(k, v, batch, column)
    tokens, _, size = k.shape
    assert (q.shape[0], q.shape[2]) == (tokens, size), f"q has shape {tuple(q.shape)}, k has {tuple(k.shape)}"
    assert q.dtype == k.dtype, f"q is {q.dtype}, k is {k.dtype}"
    assert q.stride(-1) == 1, f"q's channels are {q.stride(-1)} elements apart, not 1"
    for weight in () if norms is None else (norms.q_weight, norms.k_weight):
        assert weight.shape == (size,), f"a norm's weight has shape {tuple(weight.shape)}, heads have {size} channels"
        assert weight.dtype == k.dtype, f"a norm's weight is {weight.dtype}, k is {k.dtype}"
        assert weight.is_contiguous(), f"a norm's weight is not contiguous, its stride is {weight.stride()}"
    for angles in (rotation.cosines, rotation.sines):
        assert angles.shape == (q.shape[0], q.shape[2] // 2), f"angles {tuple(angles.shape)} for q {tuple(q.shape)}"
        assert angles.dtype == torch.float32, f"angles are {angles.dtype}"
    backend().rotate_and_store(qkv, batch, column, rotation, norms)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows [T, 2 * I], the gate's channels first: [T, I]."""
    assert gate_up.is_contiguous(), f"rows are not contiguous, their strides are {gate_up.stride()}"
    out: torch.Tensor = backend().silu_multiply(gate_up)
    return out
