"""A linear layer as a decoder calls it: rows in, rows out. In what form it holds its weight is its own affair."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import linear


class Projection(Protocol):
    """Rows through one weight. Units: `weight_bytes` is what weight and bias take in memory."""

    in_features: int
    out_features: int
    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], in the dtype of `x`."""
        ...


class MakeProjection(Protocol):
    """Makes a projection of a weight [out, in] and a bias [out]; None: there is no bias."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Projection: ...


class DenseProjection:
    """The weight as it is, multiplied by torch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features]."""
        return linear(x, self.weight, self.bias)
