"""Turning rotated rows by a number of positions. Knows no cache: rows in, rows out, in fp32.

Rotations about the same frequencies add up: a query rotated to position p and then turned back by d is R(p - d) q, and
(R(p - d) q) . (R(s) k) = (R(p) q) . (R(s + d) k). So a segment of keys is moved by d without touching one of them.
"""

from __future__ import annotations

import torch

from ktransformer2.layout import RopeSpec


def turn(rows: torch.Tensor, positions: int, rope: RopeSpec) -> torch.Tensor:
    """Rows fp32 [..., D], rotated by `positions` (negative: backwards); channels past `rotary_size` stay."""
    size = rope.rotary_size
    assert size <= rows.shape[-1], f"{size} rotated channels in a head of {rows.shape[-1]}"
    turned = rows.to(torch.float32, copy=True)
    # fp64: a product of position and frequency in fp32 would be off by 1e-3 radians at 32k positions.
    angles = torch.tensor(rope.inv_freq, dtype=torch.float64) * positions  # [size/2]
    cos, sin = angles.cos().float(), angles.sin().float()
    if rope.interleaved:
        first, second = turned[..., 0:size:2], turned[..., 1:size:2]
    else:
        first, second = turned[..., : size // 2], turned[..., size // 2 : size]
    new_first, new_second = first * cos - second * sin, second * cos + first * sin
    first.copy_(new_first)
    second.copy_(new_second)
    return turned


def turn_back(queries: torch.Tensor, shift: int, rope: RopeSpec | None) -> torch.Tensor:
    """Queries fp32 [..., D] as keys that were moved by `shift` positions must see them. No rope: nothing to turn."""
    if shift == 0 or rope is None:
        return queries.float()
    return turn(queries, -shift, rope)
