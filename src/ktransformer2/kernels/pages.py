"""Pages as tensors: addresses and a `PageLayout` become views or gathered fp32 rows. Knows no block and no sequence.

Nothing here checks that an address is mapped: only addresses from a live page table may come in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ktransformer2.kernels.quantize import dequantize, pack_keys, pack_values, quantize, unpack_keys, unpack_values
from ktransformer2.layout import (
    KEY_TILE_CHANNELS,
    KEY_TILE_TOKENS,
    PAGE_ALIGNMENT,
    SCALE_BYTES,
    VALUE_TILE_TOKENS,
    Form,
    LayerGroup,
    PageLayout,
    round_up,
)

DTYPES = {Form.FP32: torch.float32, Form.BF16: torch.bfloat16, Form.FP16: torch.float16}
FORMS = {dtype: form for form, dtype in DTYPES.items()}


def bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    """A writable uint8 view of process memory; it does not keep that memory alive."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def gather_bytes(addresses: Sequence[int], num_bytes: int) -> torch.Tensor:
    """uint8 [N, num_bytes]: what lies at N addresses, copied. Addresses and `num_bytes` are multiples of 64."""
    if len(addresses) == 1:
        return bytes_at(addresses[0], num_bytes).unsqueeze(0)  # read only once by the caller: no copy needed
    # One view over everything between the lowest and the highest page. What lies between is never touched.
    lowest, stop = min(addresses), max(addresses) + num_bytes
    lines = bytes_at(lowest, stop - lowest).view(-1, PAGE_ALIGNMENT)
    starts = torch.tensor(addresses).sub_(lowest).div_(PAGE_ALIGNMENT, rounding_mode="floor")
    wanted = starts.unsqueeze(1) + torch.arange(num_bytes // PAGE_ALIGNMENT)  # [N, lines of a section]
    return lines.index_select(0, wanted.flatten()).view(len(addresses), num_bytes)


@dataclass(frozen=True)
class Section:
    """The K or the V part of every page of one layout. Offsets in bytes from the page's address."""

    form: Form
    offset: int
    scale_offset: int
    num_heads: int
    block_tokens: int
    head_size: int
    holds_keys: bool

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.block_tokens * self.head_size * self.form.element_bytes

    @property
    def scale_bytes(self) -> int:
        return self.num_heads * self.block_tokens * SCALE_BYTES

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Shape of the int8 codes as they lie in the page."""
        g, p, d = self.num_heads, self.block_tokens, self.head_size
        if self.holds_keys:
            return g, p // KEY_TILE_TOKENS, d // KEY_TILE_CHANNELS, KEY_TILE_TOKENS, KEY_TILE_CHANNELS
        return g, p // VALUE_TILE_TOKENS, d, VALUE_TILE_TOKENS

    def full_rows(self, page: int) -> torch.Tensor:
        """Writable view [G, P, D] of a section in a full form."""
        rows = bytes_at(page + self.offset, self.num_bytes).view(DTYPES[self.form])
        return rows.view(self.num_heads, self.block_tokens, self.head_size)

    def codes(self, page: int) -> torch.Tensor:
        """Writable int8 view of an int8 section, in `tile_shape`."""
        return bytes_at(page + self.offset, self.num_bytes).view(torch.int8).view(self.tile_shape)

    def scales(self, page: int) -> torch.Tensor:
        """Writable fp16 view [G, P] of the scales of an int8 section."""
        scales = bytes_at(page + self.scale_offset, self.scale_bytes).view(torch.float16)
        return scales.view(self.num_heads, self.block_tokens)

    def write(self, page: int, rows: torch.Tensor) -> None:
        """Writes all rows [G, P, D] of the section, quantised where its form says so."""
        if self.form.is_full:
            self.full_rows(page).copy_(rows)
            return
        codes, scales = quantize(rows)
        self.codes(page).copy_(pack_keys(codes) if self.holds_keys else pack_values(codes))
        self.scales(page).copy_(scales)

    def load(self, pages: Sequence[int]) -> torch.Tensor:
        """Rows fp32 [G, N * P, D] of N pages one after the other, dequantised; it may be a view of the page."""
        g, p, d, n = self.num_heads, self.block_tokens, self.head_size, len(pages)
        raw = gather_bytes([page + self.offset for page in pages], round_up(self.num_bytes, PAGE_ALIGNMENT))
        raw = raw[:, : self.num_bytes]
        if self.form.is_full:
            rows = raw.view(DTYPES[self.form]).view(n, g, p, d).float()
        else:
            tiles = raw.view(torch.int8).view(n, *self.tile_shape)
            codes = unpack_keys(tiles) if self.holds_keys else unpack_values(tiles)  # [N, G, P, D]
            scale_bytes = round_up(self.scale_bytes, PAGE_ALIGNMENT)
            raw_scales = gather_bytes([page + self.scale_offset for page in pages], scale_bytes)
            scales = raw_scales[:, : self.scale_bytes].view(torch.float16).view(n, g, p)
            rows = dequantize(codes, scales)
        return rows.transpose(0, 1).reshape(g, n * p, d)


class Sections(NamedTuple):
    k: Section
    v: Section


@lru_cache(maxsize=256)
def sections(group: LayerGroup, block_tokens: int, k_form: Form, v_form: Form) -> Sections:
    """Both sections of a page of this group, in these forms."""
    g, dk, dv = group.num_kv_heads, group.k_head_size, group.v_head_size
    layout = PageLayout(g, dk, dv, block_tokens, k_form, v_form)
    return Sections(
        Section(k_form, 0, layout.k_scale_offset, g, block_tokens, dk, True),
        Section(v_form, layout.v_offset, layout.v_scale_offset, g, block_tokens, dv, False),
    )
