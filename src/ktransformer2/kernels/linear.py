"""Packed weights and the product of rows with them: int8 or int4 codes in groups of 32 inputs, fp16 scales.

A weight is `code * scale` (int8) or `code * scale + least` (int4): the forms of GGUF's Q8_0 and Q4_1, of which Q4_0 is
the case least = -8 * scale, so that what such a file holds is packed without a rounding. Rows are coded too, each group
of 32 inputs as int8 with a scale in fp32; products of codes are summed exactly and groups are added in order in fp32.
So a row's result depends on the row, the weights and the instruction set: not on threads, nor on the rows beside it.

Tiles of 16 outputs as `csrc/packed.h` has them. Knows no model and no file. A row with NaN or Inf comes out as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch.nn.functional import linear, pad

from ktransformer2.kernels import reference
from ktransformer2.kernels.attention import backend
from ktransformer2.kernels.pages import FORMS
from ktransformer2.layout import round_up

GROUP_INPUTS = 32
TILE_OUTPUTS = 16
_CHUNK_INPUTS = 4
_TILE_ALIGNMENT = 64
FEW_ROWS = 16
_WIDENED_BYTES = 2**20  # of fp32 weights at once: they stay in the cache until they are used
_LARGEST_CODE = 127.0
_SMALLEST_GROUP = 1e-30
PackedForm = Literal["int8", "int4"]
# Per group of an output: bytes of codes, and numbers beside them (scale; scale and least).
_CODE_BYTES: dict[PackedForm, int] = {"int8": GROUP_INPUTS, "int4": GROUP_INPUTS // 2}
_NUM_SCALES: dict[PackedForm, int] = {"int8": 1, "int4": 2}


@dataclass(frozen=True)
class CodedWeights:
    """Rows of a weight [N, K] as codes, in their own order. What is missing of the last group has no meaning.

    Shapes: `codes` uint8 [N, G, 32] (int8's bits) or [N, G, 16] (input i in the low nibble of byte i, input 16 + i in
    the high one), with G = ceil(K / 32); `scales` fp16 [N, G, 1], or [N, G, 2] with the least value behind the scale.
    """

    form: PackedForm
    num_inputs: int
    codes: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        groups = num_groups(self.num_inputs)
        n = self.codes.shape[0]
        assert self.codes.dtype == torch.uint8, f"codes are {self.codes.dtype}"
        assert self.scales.dtype == torch.float16, f"scales are {self.scales.dtype}"
        assert self.codes.shape == (n, groups, _CODE_BYTES[self.form]), f"codes have shape {tuple(self.codes.shape)}"
        assert self.scales.shape == (n, groups, _NUM_SCALES[self.form]), f"scales: {tuple(self.scales.shape)}"

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    def rows(self, index: torch.Tensor) -> CodedWeights:
        """The outputs of these numbers, in this order."""
        return CodedWeights(self.form, self.num_inputs, self.codes[index], self.scales[index])

    def values(self) -> torch.Tensor:
        """The weights they stand for, fp32 [N, K]."""
        scale = self.scales.float()
        if self.form == "int8":
            values = self.codes.view(torch.int8).float() * scale
        else:
            nibbles = torch.cat([self.codes & 15, self.codes >> 4], dim=-1)
            values = nibbles.float() * scale[..., :1] + scale[..., 1:]
        return values.flatten(1)[:, : self.num_inputs]


@dataclass(frozen=True)
class PackedMatrix:
    """A weight [N, K] in tiles. `tiles` uint8 [ceil(N / 16), bytes of a tile], `bias` fp32 [N]."""

    form: PackedForm
    num_outputs: int
    num_inputs: int
    tiles: torch.Tensor
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shape = tiles_shape(self.form, self.num_outputs, self.num_inputs)
        assert self.tiles.shape == shape, f"tiles have shape {tuple(self.tiles.shape)}, not {shape}"
        assert self.tiles.dtype == torch.uint8, f"tiles are {self.tiles.dtype}"
        assert self.tiles.is_contiguous(), f"tiles are not contiguous, their strides are {self.tiles.stride()}"
        if self.bias is not None:
            assert self.bias.shape == (self.num_outputs,), f"bias has shape {tuple(self.bias.shape)}"
            assert self.bias.dtype == torch.float32, f"bias is {self.bias.dtype}"
            assert self.bias.is_contiguous(), f"bias is not contiguous, its stride is {self.bias.stride()}"

    def coded_rows(self, index: torch.Tensor) -> CodedWeights:
        """The codes of the outputs `index` [n], out of their tiles."""
        scales, codes = _views(self.form, self.num_inputs, self.tiles)
        tile, lane = index // TILE_OUTPUTS, index % TILE_OUTPUTS
        return CodedWeights(
            self.form, self.num_inputs, codes[tile, :, :, lane].flatten(2), scales[tile, :, :, lane].contiguous()
        )

    @cached_property
    def native(self) -> Any:
        """The addresses, as the C++ kernels take them."""
        from ktransformer2.kernels import cpu  # only where the extension was built

        return cpu.packed_matrix(self.tiles, self.bias, self.num_outputs, self.num_inputs, self.form == "int4")


def num_groups(num_inputs: int) -> int:
    """Groups of a row; the last may be filled in part."""
    return -(-num_inputs // GROUP_INPUTS)


def tiles_shape(form: PackedForm, num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """(tiles, bytes of a tile) of a weight."""
    groups = num_groups(num_inputs)
    return -(-num_outputs // TILE_OUTPUTS), _scale_bytes(form, groups) + groups * TILE_OUTPUTS * _CODE_BYTES[form]


def pack(weights: CodedWeights, tiles: torch.Tensor, bias: torch.Tensor | None = None) -> PackedMatrix:
    """The weights in tiles. Side effect: writes all of `tiles`, whose shape is `tiles_shape`."""
    matrix = PackedMatrix(weights.form, weights.num_outputs, weights.num_inputs, tiles, bias)
    scales, codes = _views(weights.form, weights.num_inputs, tiles)
    missing = -weights.num_outputs % TILE_OUTPUTS
    by_tile = (len(tiles), TILE_OUTPUTS, weights.codes.shape[1])
    of_tiles = pad(weights.codes, (0, 0, 0, 0, 0, missing)).view(*by_tile, -1, _CHUNK_INPUTS)
    tiles[:, : _scale_bytes(weights.form, weights.codes.shape[1])] = 0
    codes.copy_(of_tiles.permute(0, 2, 3, 1, 4))
    scales.copy_(pad(weights.scales, (0, 0, 0, 0, 0, missing)).view(*by_tile, -1).permute(0, 2, 3, 1))
    return matrix


def multiply(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """x [T, K] times the weights, plus bias: [T, N] in x's dtype (fp32, bf16, fp16)."""
    assert x.ndim == 2, f"x has shape {tuple(x.shape)}"
    assert x.shape[1] == matrix.num_inputs, f"x has {x.shape[1]} inputs, the weights {matrix.num_inputs}"
    assert x.dtype in FORMS, f"x is {x.dtype}; rows come in {', '.join(map(str, FORMS))}"
    native = backend()
    if native is reference:
        return multiply_reference(x, matrix)
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    out = x.new_empty((x.shape[0], matrix.num_outputs))
    native.multiply_packed(matrix.native, x, out)
    return out


def multiply_reference(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """The oracle of `multiply`: the same codes of the rows, weights unpacked, summed in fp64."""
    codes, scales = code_rows(x)
    rows = (codes.double() * scales.double().unsqueeze(-1)).flatten(1)[:, : matrix.num_inputs]
    out = rows @ matrix.coded_rows(torch.arange(matrix.num_outputs)).values().double().T
    if matrix.bias is not None:
        out += matrix.bias
    return out.to(x.dtype)


def multiply_dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times a weight [N, K] as it is (fp32, bf16, fp16), plus bias fp32 [N]: [T, N] in x's dtype.

    Up to FEW_ROWS rows each one is multiplied by itself, in fp32, and its result does not depend on the others; more go
    through torch's matmul, in their own dtype if the weight has it, else in fp32, a piece of the weight at a time.
    """
    if x.shape[0] <= FEW_ROWS and (native := backend()) is not reference:
        rows, few = x.float().contiguous(), x.new_empty((x.shape[0], weight.shape[0]))
        native.multiply_dense(rows, weight, bias, few)
        return few
    if x.dtype == weight.dtype:
        return linear(x, weight, None if bias is None else bias.to(x.dtype))
    rows, out = x.float(), torch.empty((x.shape[0], weight.shape[0]))
    at_once = max(_WIDENED_BYTES // (4 * weight.shape[1]), 1)
    for start in range(0, weight.shape[0], at_once):
        piece = slice(start, start + at_once)
        torch.mm(rows, weight[piece].float().T, out=out[:, piece])
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def code_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [T, G, 32] and scales fp32 [T, G] of rows x [T, K]; the last group is filled up with zeros."""
    whole = pad(x.float(), (0, -x.shape[1] % GROUP_INPUTS))
    groups = whole.view(len(x), num_groups(x.shape[1]), GROUP_INPUTS)
    largest = groups.abs().amax(-1)
    poison = (groups * 0).sum(-1)  # NaN where a value is not finite
    inverse = torch.where(largest > _SMALLEST_GROUP, _LARGEST_CODE / largest, 0.0)
    codes = (groups * inverse.unsqueeze(-1)).round().nan_to_num(nan=0.0)
    return codes.to(torch.int8), largest / _LARGEST_CODE + poison


def _scale_bytes(form: PackedForm, groups: int) -> int:
    return round_up(groups * _NUM_SCALES[form] * TILE_OUTPUTS * 2, _TILE_ALIGNMENT)


def _views(form: PackedForm, num_inputs: int, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales fp16 [tiles, G, 1 or 2, 16] and codes uint8 [tiles, G, chunks, 16, 4] inside the tiles."""
    groups, num_scales = num_groups(num_inputs), _NUM_SCALES[form]
    scales = tiles[:, : groups * num_scales * TILE_OUTPUTS * 2].view(torch.float16)
    codes = tiles[:, _scale_bytes(form, groups) :]
    chunks = _CODE_BYTES[form] // _CHUNK_INPUTS
    return (
        scales.view(len(tiles), groups, num_scales, TILE_OUTPUTS),
        codes.view(len(tiles), groups, chunks, TILE_OUTPUTS, _CHUNK_INPUTS),
    )
