"""How keys and values lie in memory: forms, pages, extents, and the shape letters. Knows no allocator and no tensor.

Shape letters, used in every comment and docstring of the package:
    T tokens in a step, S sequences, B blocks, L layers of a group,
    H query heads, G KV heads, D head size, P block tokens.

A **page** is one layer of one block: `K | K scales | V | V scales`, each section on a 64-byte boundary.
    full form   K [G, P, Dk], V [G, P, Dv]            in fp32, bf16 or fp16
    int8        K codes [G, P/16, Dk/4, 16, 4]        16 tokens x 4 channels: a dot product needs no horizontal sum
                V codes [G, P/4, Dv, 4]               4 tokens x channel
                scales  [G, P] fp16, one per token and head, for K and for V: value = code * scale, |code| <= 127
The layout is the same for every instruction set, so a page can be read by any machine.
An **extent** holds all pages of a block, layer after layer, in one contiguous range.

Invariants: page addresses are multiples of 64; extents are multiples of 4,096 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

# Part of every fingerprint and hash chain: a change in how a key or value is computed or sealed must not meet older
# blocks.
NUMERICS_VERSION = 2
PAGE_ALIGNMENT = 64
EXTENT_ALIGNMENT = 4096
KEY_TILE_TOKENS = 16
KEY_TILE_CHANNELS = 4
VALUE_TILE_TOKENS = 4
SCALE_BYTES = 2
# Partial attention sums are taken over this many consecutive block-table entries, whatever the thread count.
ENTRIES_PER_PARTIAL = 8
BLOCK_TOKENS_ALLOWED = (16, 32, 64, 128, 256)
_FORM_BITS = 3
_FORM_MASK = (1 << _FORM_BITS) - 1


class Form(IntEnum):
    """How rows are held. The value is what the low bits of a page-table entry carry; 0 means not on this device."""

    ABSENT = 0
    FP32 = 1
    BF16 = 2
    FP16 = 3
    INT8 = 4

    @property
    def is_full(self) -> bool:
        """True for the forms a model computes in; False for quantised ones."""
        return self in (Form.FP32, Form.BF16, Form.FP16)

    @property
    def element_bytes(self) -> int:
        return {Form.FP32: 4, Form.BF16: 2, Form.FP16: 2, Form.INT8: 1}[self]


def pack_page(address: int, k_form: Form, v_form: Form) -> int:
    """A page-table entry: the address with both forms in its low six bits."""
    assert address % PAGE_ALIGNMENT == 0, f"page address {address:#x} is not a multiple of {PAGE_ALIGNMENT}"
    return address | int(k_form) | int(v_form) << _FORM_BITS


def unpack_page(entry: int) -> tuple[int, Form, Form]:
    """(address, K form, V form) of a page-table entry."""
    return entry & ~(PAGE_ALIGNMENT - 1), Form(entry & _FORM_MASK), Form(entry >> _FORM_BITS & _FORM_MASK)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block's fate: the same head shapes and the same window.

    `layers` are the model's layer indices; a page-table column is an index into this tuple.
    `window` is the number of newest tokens a query sees, itself included; None means all of them.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    k_head_size: int
    v_head_size: int
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        """K and V elements that one token holds over all layers of the group."""
        return len(self.layers) * self.num_kv_heads * (self.k_head_size + self.v_head_size)


@dataclass(frozen=True)
class RopeSpec:
    """Fixed-frequency rotary embedding, as far as a shift needs it. None in its place: the layers are not rotated.

    `inv_freq` has rotary_size / 2 entries (radians per position); the first `rotary_size` channels of a head are
    rotated, channel i with channel i + rotary_size/2 (`interleaved=False`) or 2i with 2i+1 (`interleaved=True`).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False

    @property
    def rotary_size(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class ModelGeometry:
    """What the cache must know of a model: its layer groups, and the form its keys and values are computed in.

    `rope[i]` belongs to `groups[i]`. `max_positions` is the model's own context length in tokens.
    `shift_refused` says why keys of this model may not be moved (dynamic NTK, longrope, M-RoPE); empty: they may.
    """

    groups: tuple[LayerGroup, ...]
    full_form: Form
    max_positions: int
    rope: tuple[RopeSpec | None, ...]
    shift_refused: str = ""

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @cached_property
    def layer_place(self) -> dict[int, tuple[int, int]]:
        """Model layer index -> (group index, page-table column)."""
        return {layer: (g, column) for g, group in enumerate(self.groups) for column, layer in enumerate(group.layers)}


@dataclass(frozen=True)
class PageLayout:
    """Where the four sections of one page begin, in bytes from the page's address."""

    num_kv_heads: int
    k_head_size: int
    v_head_size: int
    block_tokens: int
    k_form: Form
    v_form: Form

    @staticmethod
    def _codes(form: Form, heads: int, tokens: int, size: int) -> int:
        return heads * tokens * size * form.element_bytes

    def _scales(self, form: Form) -> int:
        return 0 if form.is_full else self.num_kv_heads * self.block_tokens * SCALE_BYTES

    @cached_property
    def k_scale_offset(self) -> int:
        return round_up(
            self._codes(self.k_form, self.num_kv_heads, self.block_tokens, self.k_head_size), PAGE_ALIGNMENT
        )

    @cached_property
    def v_offset(self) -> int:
        return self.k_scale_offset + round_up(self._scales(self.k_form), PAGE_ALIGNMENT)

    @cached_property
    def v_scale_offset(self) -> int:
        codes = self._codes(self.v_form, self.num_kv_heads, self.block_tokens, self.v_head_size)
        return self.v_offset + round_up(codes, PAGE_ALIGNMENT)

    @cached_property
    def page_bytes(self) -> int:
        return self.v_scale_offset + round_up(self._scales(self.v_form), PAGE_ALIGNMENT)


@dataclass(frozen=True)
class ExtentLayout:
    """All pages of one block of one layer group. `forms[i]` is the (K, V) form of the group's i-th layer."""

    group: LayerGroup
    block_tokens: int
    forms: tuple[tuple[Form, Form], ...]

    @classmethod
    def uniform(cls, group: LayerGroup, block_tokens: int, form: Form) -> ExtentLayout:
        return cls(group, block_tokens, ((form, form),) * len(group.layers))

    @cached_property
    def pages(self) -> tuple[PageLayout, ...]:
        g = self.group
        return tuple(
            PageLayout(g.num_kv_heads, g.k_head_size, g.v_head_size, self.block_tokens, k_form, v_form)
            for k_form, v_form in self.forms
        )

    @cached_property
    def page_offsets(self) -> tuple[int, ...]:
        offsets, at = [], 0
        for page in self.pages:
            offsets.append(at)
            at += page.page_bytes
        return tuple(offsets)

    @cached_property
    def extent_bytes(self) -> int:
        return round_up(sum(page.page_bytes for page in self.pages), EXTENT_ALIGNMENT)

    def entries(self, address: int) -> list[int]:
        """The page-table row of a block whose extent begins at `address`."""
        return [
            pack_page(address + offset, k_form, v_form)
            for offset, (k_form, v_form) in zip(self.page_offsets, self.forms, strict=True)
        ]
