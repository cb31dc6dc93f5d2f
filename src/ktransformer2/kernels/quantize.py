"""Int8 rows: quantise, dequantise, and the tile order of codes inside a page. Knows no page address and no block.

Symmetric, one fp16 scale per token and head: `scale = fp16(absmax / 127)`, `code = round_half_even(value / scale)`,
clamped to +-127; `value = code * scale`. A row of zeros (or too small for fp16) has scale 0 and codes 0. A row with NaN
or Inf, or with an absmax / 127 beyond fp16, gets a scale that is not finite, so it reads back as NaN: loud, no crash.

The tile orders are those of `layout`: K `[G, P/16, Dk/4, 16, 4]`, V `[G, P/4, Dv, 4]`.
"""

from __future__ import annotations

import torch

from ktransformer2.layout import KEY_TILE_CHANNELS, KEY_TILE_TOKENS, VALUE_TILE_TOKENS

MAX_CODE = 127


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [..., D] and scales fp16 [...] of rows [..., D] in any floating dtype."""
    rows = rows.float()
    scales = (rows.abs().amax(dim=-1) / MAX_CODE).to(torch.float16)
    codes = (rows / scales.float().unsqueeze(-1)).round()
    # 0/0 of a zero row and everything in a row that is not finite: code 0. x/0 of a tiny row is infinite: also 0.
    codes = codes.nan_to_num(nan=0.0).clamp(-MAX_CODE, MAX_CODE)
    codes = torch.where((scales == 0).unsqueeze(-1), 0.0, codes)
    return codes.to(torch.int8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows fp32 [..., D] of codes int8 [..., D] and scales fp16 [...]."""
    return codes.float().mul_(scales.float().unsqueeze(-1))


def pack_keys(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., P, D] in the tile order of a page: [..., P/16, D/4, 16, 4]."""
    *outer, p, d = codes.shape
    tiles = codes.reshape(*outer, p // KEY_TILE_TOKENS, KEY_TILE_TOKENS, d // KEY_TILE_CHANNELS, KEY_TILE_CHANNELS)
    return tiles.transpose(-3, -2).contiguous()


def unpack_keys(tiles: torch.Tensor) -> torch.Tensor:
    """Codes [..., P, D] of the tiles [..., P/16, D/4, 16, 4]: undoes `pack_keys`."""
    return tiles.transpose(-3, -2).flatten(-2, -1).flatten(-3, -2)


def pack_values(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., P, D] in the tile order of a page: [..., P/4, D, 4]."""
    *outer, p, d = codes.shape
    return codes.reshape(*outer, p // VALUE_TILE_TOKENS, VALUE_TILE_TOKENS, d).transpose(-2, -1).contiguous()


def unpack_values(tiles: torch.Tensor) -> torch.Tensor:
    """Codes [..., P, D] of the tiles [..., P/4, D, 4]: undoes `pack_values`."""
    return tiles.transpose(-2, -1).flatten(-3, -2)
