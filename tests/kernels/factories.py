"""Ragged batches over real pages in memory, and what attention over them must be: loops in fp64.

Nothing here uses the code under test: pages are written and read element by element from the formulas of `layout`.
Pages lie apart, with guard bytes between them; bytes that nobody wrote are 0xFF, which is NaN in every floating form.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ktransformer2.kernels.batch import AttentionParams, KVBatch
from ktransformer2.layout import (
    PAGE_ALIGNMENT,
    Form,
    LayerGroup,
    PageLayout,
    RopeSpec,
    pack_page,
    round_up,
    unpack_page,
)

Array = npt.NDArray[Any]
DTYPES = {Form.FP32: torch.float32, Form.BF16: torch.bfloat16, Form.FP16: torch.float16}
COLUMN = 1  # of two layers: the kernels are run on the second, the first must stay untouched
_GUARD = 0x5A
_UNWRITTEN = 0xFF


@dataclass(frozen=True)
class Shape:
    """H query heads over G KV heads, K and V head sizes, P block tokens."""

    H: int = 4
    G: int = 2
    Dk: int = 32
    Dv: int = 32
    P: int = 16


@dataclass(frozen=True)
class Forms:
    """The model's own form, and the forms of K and V in a sealed page."""

    full: Form
    k: Form
    v: Form

    @property
    def sealed_is_full(self) -> bool:
        return self.k.is_full and self.v.is_full


@dataclass(frozen=True)
class Piece:
    """One block-table entry. `kept_open`: its rows as computed are kept beside the sealed ones (for a rollback)."""

    rows: int
    first_row: int = 0
    shift: int = 0
    released: bool = False
    kept_open: bool = False


@dataclass(frozen=True)
class Plan:
    """One sequence: entries it had before the step, the rows of a block begun earlier, and the new tokens.

    `open_fresh`: blocks that become full in this step have an open page too, so that they are sealed from it.
    """

    new: int
    earlier: tuple[Piece, ...] = ()
    begun: Piece | None = None
    open_fresh: bool = False


class PageMemory:
    """A buffer from which pages are taken; guard bytes before and behind each."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = np.full(num_bytes, _GUARD, dtype=np.uint8)
        self._at = round_up(self._buffer.ctypes.data, PAGE_ALIGNMENT)
        self._stop = self._buffer.ctypes.data + num_bytes
        self._used: list[tuple[int, int]] = []

    def page(self, layout: PageLayout, gap_lines: int) -> int:
        address = self._at + PAGE_ALIGNMENT * (1 + gap_lines)
        self._at = address + layout.page_bytes
        assert self._at + PAGE_ALIGNMENT <= self._stop, "the factory's buffer is too small"
        raw_bytes(address, layout.page_bytes)[:] = _UNWRITTEN
        self._used.append((address, layout.page_bytes))
        return address

    def keep(self) -> None:
        """Remembers every byte, for `restore`."""
        self._kept = self._buffer[: self._at + PAGE_ALIGNMENT - self._buffer.ctypes.data].copy()

    def restore(self) -> None:
        self._buffer[: self._kept.size] = self._kept

    def check_guards(self) -> None:
        end = self._buffer.ctypes.data
        for address, num_bytes in [*self._used, (self._stop, 0)]:
            guard = raw_bytes(end, address - end)
            assert (guard == _GUARD).all(), f"{(guard != _GUARD).sum()} bytes before or behind a page were written"
            end = address + num_bytes


def raw_bytes(address: int, num_bytes: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def key_code_index(G: int, P: int, D: int) -> Array:
    """[G, P, D] -> place of the code in K [G, P/16, D/4, 16, 4]."""
    g, t, c = np.ogrid[:G, :P, :D]
    index: Array = ((g * (P // 16) + t // 16) * (D // 4) + c // 4) * 64 + t % 16 * 4 + c % 4
    return index


def value_code_index(G: int, P: int, D: int) -> Array:
    """[G, P, D] -> place of the code in V [G, P/4, D, 4]."""
    g, t, c = np.ogrid[:G, :P, :D]
    index: Array = ((g * (P // 4) + t // 4) * D + c) * 4 + t % 4
    return index


def quantised(rows: Array) -> tuple[Array, Array]:
    """(codes, scales) of rows [..., D]."""
    values = rows.astype(np.float32)
    scales = (np.abs(values).max(-1) / np.float32(127)).astype(np.float16)
    safe = np.where(scales > 0, scales, np.float16(1)).astype(np.float32)[..., None]
    codes = np.where(scales[..., None] > 0, np.clip(np.rint(values / safe), -127, 127), 0)
    return codes.astype(np.int8), scales


def read_back(rows: torch.Tensor, form: Form) -> torch.Tensor:
    """Rows [..., D] as they come out of a page in this form, in fp64."""
    if form.is_full:
        return rows.to(DTYPES[form]).double()
    codes, scales = quantised(rows.double().numpy())
    return torch.from_numpy(codes.astype(np.float64) * scales.astype(np.float64)[..., None])


def section_bytes(rows: torch.Tensor, form: Form, holds_keys: bool) -> tuple[Array, Array]:
    """(codes, scales) as bytes of a page section that holds rows [P, G, D]."""
    by_head = rows.transpose(0, 1).contiguous()  # [G, P, D]
    if form.is_full:
        return by_head.to(DTYPES[form]).view(torch.uint8).flatten().numpy(), np.zeros(0, np.uint8)
    codes, scales = quantised(by_head.double().numpy())
    placed = np.zeros(codes.size, np.int8)
    placed[(key_code_index if holds_keys else value_code_index)(*codes.shape)] = codes
    return placed.view(np.uint8), scales.view(np.uint8).flatten()


def write_page(address: int, layout: PageLayout, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes all rows k [P, G, Dk], v [P, G, Dv]."""
    for offset, data in page_bytes(layout, k, v):
        raw_bytes(address + offset, data.size)[:] = data


def page_bytes(layout: PageLayout, k: torch.Tensor, v: torch.Tensor) -> list[tuple[int, Array]]:
    """(offset, bytes) of all four sections."""
    k_codes, k_scales = section_bytes(k, layout.k_form, True)
    v_codes, v_scales = section_bytes(v, layout.v_form, False)
    offsets = (0, layout.k_scale_offset, layout.v_offset, layout.v_scale_offset)
    return [
        (offset, data)
        for offset, data in zip(offsets, (k_codes, k_scales, v_codes, v_scales), strict=True)
        if data.size
    ]


@dataclass(frozen=True)
class Tokens:
    """What a query may read of the tokens of one entry, in fp64 [n, G, D]."""

    entry: int
    shift: int
    released: bool
    k: torch.Tensor
    v: torch.Tensor
    k_sealed: torch.Tensor
    v_sealed: torch.Tensor

    def __len__(self) -> int:
        return self.k.shape[0]


@dataclass
class Scenario:
    """A batch over real pages. `tokens[s]` is what sequence s holds; `sealed` the rows of blocks that become full.

    `reset` puts every page back to what it was before anything was run.
    """

    shape: Shape
    forms: Forms
    memory: PageMemory
    batch: KVBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tokens: list[list[Tokens]]
    sealed: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def reset(self) -> Scenario:
        self.memory.restore()
        return self

    def layout_of(self, entry: int) -> PageLayout:
        _, k_form, v_form = unpack_page(entry)
        s = self.shape
        return PageLayout(s.G, s.Dk, s.Dv, s.P, k_form, v_form)

    def expected(self, params: AttentionParams) -> torch.Tensor:
        """fp64 [T, H, Dv], one sequence and one head at a time."""
        rows, first = [], 0
        for tokens, seen in zip(self.tokens, self.batch.context_lens.tolist(), strict=True):
            stop = first + sum(map(len, tokens)) - seen
            rows.append(_expected_of_sequence(self.q[first:stop].double(), tokens, params))
            first = stop
        assert first == self.q.shape[0]
        return torch.cat(rows)

    def check_sealed_pages(self) -> None:
        """Every block that became full holds the sealed bytes in the layer that was run, to the last bit."""
        for block, (k, v) in self.sealed.items():
            entry = int(self.batch.page_table[block, COLUMN])
            address, _, _ = unpack_page(entry)
            for offset, want in page_bytes(self.layout_of(entry), k, v):
                np.testing.assert_array_equal(raw_bytes(address + offset, want.size), want, f"block {block} +{offset}")

    def check_other_layer(self) -> None:
        """No page of the layer that was not run has a byte written."""
        for table in (self.batch.page_table, self.batch.open_table):
            for entry in table[:, 1 - COLUMN].tolist():
                if entry:
                    assert (raw_bytes(unpack_page(entry)[0], self.layout_of(entry).page_bytes) == _UNWRITTEN).all()


def _expected_of_sequence(q: torch.Tensor, tokens: list[Tokens], params: AttentionParams) -> torch.Tensor:
    """[n, H, Dv] of q fp64 [n, H, Dk], a sequence's last n tokens: both forms are read whole, then a mask takes one."""
    (n, num_heads, _), num_kv_heads, seen = q.shape, tokens[0].k.shape[1], sum(map(len, tokens)) - q.shape[0]
    of_token = [t for t in tokens for _ in range(len(t))]
    entry, shift = torch.tensor([t.entry for t in of_token]), torch.tensor([t.shift for t in of_token])
    k, k_sealed = torch.cat([t.k for t in tokens]), torch.cat([t.k_sealed for t in tokens])  # [J, G, Dk]
    v, v_sealed = torch.cat([t.v for t in tokens]), torch.cat([t.v_sealed for t in tokens])
    token, query = torch.arange(seen + n), torch.arange(seen, seen + n)[:, None]
    own = entry == entry[query]  # [n, J]
    hidden = torch.tensor([t.released for t in of_token]) | (token > query)
    if params.window is not None:
        hidden |= query - token >= params.window
    out = torch.empty(n, num_heads, v.shape[2], dtype=torch.float64)
    for h in range(num_heads):
        g = h // (num_heads // num_kv_heads)
        scores = torch.empty(n, seen + n, dtype=torch.float64)
        for d in sorted(set(shift.tolist())):
            turned = turned_back(q[:, h], d, params.rope)
            at_d = torch.where(own, turned @ k[:, g].T, turned @ k_sealed[:, g].T)
            scores = torch.where(shift == d, at_d, scores)
        scores *= params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        scores[hidden] = -torch.inf
        if params.sinks is not None:
            scores = torch.cat([scores, params.sinks[h].double().expand(n, 1)], dim=1)
        weights = scores.softmax(dim=1)[:, : seen + n]
        out[:, h] = (weights * own) @ v[:, g] + (weights * ~own) @ v_sealed[:, g]
    return out


def turned_back(q: torch.Tensor, shift: int, rope: RopeSpec | None) -> torch.Tensor:
    """q fp64 [..., D] turned back by `shift` positions, a pair of channels at a time."""
    out = q.clone()
    if rope is None:
        return out
    for i, freq in enumerate(rope.inv_freq):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + len(rope.inv_freq))
        cos, sin = math.cos(-shift * freq), math.sin(-shift * freq)
        out[..., a], out[..., b] = q[..., a] * cos - q[..., b] * sin, q[..., a] * sin + q[..., b] * cos
    return out


class _Builder:
    """Collects blocks, entries and rows of a scenario; block ids are drawn so that neighbours are not adjacent."""

    def __init__(self, shape: Shape, forms: Forms, num_blocks: int, seed: int) -> None:
        self.shape, self.forms = shape, forms
        self.random = torch.Generator().manual_seed(seed)
        self.group = LayerGroup((3, 7), shape.G, shape.Dk, shape.Dv)
        self.sealed_layout = PageLayout(shape.G, shape.Dk, shape.Dv, shape.P, forms.k, forms.v)
        self.open_layout = PageLayout(shape.G, shape.Dk, shape.Dv, shape.P, forms.full, forms.full)
        page = max(self.sealed_layout.page_bytes, self.open_layout.page_bytes) + 4 * PAGE_ALIGNMENT
        self.memory = PageMemory(4 * num_blocks * page + 4096)
        self.page_table = torch.zeros(num_blocks + 3, 2, dtype=torch.int64)
        self.open_table = torch.zeros_like(self.page_table)
        self.ids = torch.randperm(num_blocks + 3, generator=self.random).tolist()
        self.entries: list[tuple[int, int, int, int]] = []
        self.seals: list[tuple[int, int]] = []
        self.slots: list[int] = []
        self.new_k: list[torch.Tensor] = []
        self.new_v: list[torch.Tensor] = []
        self.sealed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random k [count, G, Dk] and v [count, G, Dv] in the model's dtype; rows differ in size, as real ones do."""
        s, dtype = self.shape, DTYPES[self.forms.full]
        size = torch.rand(count, s.G, 1, generator=self.random) * 2 + 0.1
        k = torch.randn(count, s.G, s.Dk, generator=self.random) * size
        v = torch.randn(count, s.G, s.Dv, generator=self.random) * size
        return k.to(dtype), v.to(dtype)

    def place(self, table: torch.Tensor, layout: PageLayout, block: int) -> int:
        """Gives a block a page in both layers; the address in the layer that is run."""
        for column in range(2):
            gap = int(torch.randint(0, 3, (), generator=self.random))
            table[block, column] = pack_page(self.memory.page(layout, gap), layout.k_form, layout.v_form)
        return unpack_page(int(table[block, COLUMN]))[0]

    def tokens(self, entry: int, shift: int, k: torch.Tensor, v: torch.Tensor) -> Tokens:
        k_sealed, v_sealed = read_back(k, self.forms.k), read_back(v, self.forms.v)
        return Tokens(entry, shift, False, k.double(), v.double(), k_sealed, v_sealed)

    def earlier(self, piece: Piece) -> Tokens:
        entry = len(self.entries)
        if piece.released:
            self.entries.append((-1, piece.first_row, piece.rows, piece.shift))
            k, v = (torch.zeros(piece.rows, self.shape.G, d).double() for d in (self.shape.Dk, self.shape.Dv))
            return Tokens(entry, piece.shift, True, k, v, k, v)
        block = self.ids.pop()
        k, v = self.rows(self.shape.P)
        write_page(self.place(self.page_table, self.sealed_layout, block), self.sealed_layout, k, v)
        if piece.kept_open:
            # Not the same rows, so that a reader of the wrong page is seen.
            write_page(self.place(self.open_table, self.open_layout, block), self.open_layout, k + 1, v + 1)
        self.entries.append((block, piece.first_row, piece.rows, piece.shift))
        part = slice(piece.first_row, piece.first_row + piece.rows)
        return self.tokens(entry, piece.shift, k[part], v[part])

    def current(self, piece: Piece, new: int, open_fresh: bool) -> Tokens:
        """A block with `piece.rows` rows from before the step, and `new` rows of it."""
        s, entry, block = self.shape, len(self.entries), self.ids.pop()
        first_new = piece.first_row + piece.rows
        becomes_full = first_new + new == s.P
        k, v = self.rows(s.P)
        sealed_page = 0
        if self.forms.sealed_is_full or becomes_full:
            sealed_page = self.place(self.page_table, self.sealed_layout, block)
        fresh = becomes_full and first_new == 0 and not open_fresh
        if self.forms.sealed_is_full:
            self._write_first_rows(sealed_page, k, v, first_new)
        elif not fresh:
            self._write_first_rows(self.place(self.open_table, self.open_layout, block), k, v, first_new)
        if becomes_full:
            self.sealed[block] = (k, v)
            if not self.forms.sealed_is_full:
                self.seals.append((block, sum(map(len, self.new_k)) if fresh else -1))
        self.slots += [block * s.P + row for row in range(first_new, first_new + new)]
        self.new_k.append(k[first_new : first_new + new])
        self.new_v.append(v[first_new : first_new + new])
        self.entries.append((block, piece.first_row, piece.rows + new, piece.shift))
        part = slice(piece.first_row, first_new + new)
        return self.tokens(entry, piece.shift, k[part], v[part])

    def _write_first_rows(self, address: int, k: torch.Tensor, v: torch.Tensor, count: int) -> None:
        s, dtype = self.shape, DTYPES[self.forms.full]
        for rows, size, offset in ((k, s.Dk, 0), (v, s.Dv, self.open_layout.v_offset)):
            width = size * dtype.itemsize
            for g in range(s.G):
                data = rows[:count, g].contiguous().view(torch.uint8).flatten().numpy()
                raw_bytes(address + offset + g * s.P * width, s.P * width)[: count * width] = data


class GrowingSequence:
    """One sequence of T tokens that is computed in chunks of any size, as a cache would hand it to the kernels.

    `batch(n)` says where the next n tokens go; after it was run, `computed(n)` lets full blocks lose their open page.
    """

    def __init__(self, shape: Shape, forms: Forms, num_tokens: int, seed: int = 0) -> None:
        self._b = _Builder(shape, forms, -(-num_tokens // shape.P), seed)
        self.q = torch.randn(num_tokens, shape.H, shape.Dk, generator=self._b.random).to(DTYPES[forms.full])
        self.k, self.v = self._b.rows(num_tokens)
        self.seen = 0
        self._blocks: list[int] = []

    def batch(self, new: int) -> KVBatch:
        b, p, total = self._b, self._b.shape.P, self.seen + new
        seals = []
        for start in range(self.seen // p * p, total, p):
            if start >= self.seen:
                self._blocks.append(b.ids.pop())
            block, is_full = self._blocks[start // p], start + p <= total
            if b.page_table[block, COLUMN] == 0 and (is_full or b.forms.sealed_is_full):
                b.place(b.page_table, b.sealed_layout, block)
            if not is_full and not b.forms.sealed_is_full and b.open_table[block, COLUMN] == 0:
                b.place(b.open_table, b.open_layout, block)
            if is_full and not b.forms.sealed_is_full:
                seals.append((block, start - self.seen if start >= self.seen else -1))
        rows = [min(p, total - start) for start in range(0, total, p)]
        return KVBatch(
            group=b.group,
            block_tokens=p,
            page_table=b.page_table.clone(),
            open_table=b.open_table.clone(),
            slot_mapping=torch.tensor([self._blocks[i // p] * p + i % p for i in range(self.seen, total)]),
            query_starts=_int32([0, new]),
            context_lens=_int32([self.seen]),
            entry_starts=_int32([0, len(rows)]),
            entries=_int32([(block, 0, n, 0) for block, n in zip(self._blocks, rows, strict=True)]),
            seals=_int32(seals).view(-1, 2),
        )

    def computed(self, new: int) -> None:
        self.seen += new
        for block in self._blocks[: self.seen // self._b.shape.P]:
            self._b.open_table[block] = 0


def build(shape: Shape, forms: Forms, plans: Sequence[Plan], seed: int = 0) -> Scenario:
    """Pages, tables and new rows for these sequences, ready for store_kv, seal and paged_attention on `COLUMN`."""
    num_blocks = sum(len(p.earlier) + 2 + p.new // shape.P + 1 for p in plans)
    b = _Builder(shape, forms, num_blocks, seed)
    all_tokens, query_starts, context_lens, entry_starts = [], [0], [], [0]
    for plan in plans:
        tokens = [b.earlier(piece) for piece in plan.earlier]
        left, piece = plan.new, plan.begun or Piece(0)
        context_lens.append(sum(map(len, tokens)) + piece.rows)
        while left:
            new = min(left, shape.P - piece.first_row - piece.rows)
            tokens.append(b.current(piece, new, plan.open_fresh))
            left, piece = left - new, Piece(0)
        all_tokens.append(tokens)
        query_starts.append(query_starts[-1] + plan.new)
        entry_starts.append(len(b.entries))
    batch = KVBatch(
        group=b.group,
        block_tokens=shape.P,
        page_table=b.page_table,
        open_table=b.open_table,
        slot_mapping=torch.tensor(b.slots, dtype=torch.int64),
        query_starts=_int32(query_starts),
        context_lens=_int32(context_lens),
        entry_starts=_int32(entry_starts),
        entries=_int32(b.entries).view(-1, 4),
        seals=_int32(b.seals).view(-1, 2),
    )
    q = torch.randn(query_starts[-1], shape.H, shape.Dk, generator=b.random).to(DTYPES[forms.full])
    b.memory.keep()
    return Scenario(shape, forms, b.memory, batch, q, torch.cat(b.new_k), torch.cat(b.new_v), all_tokens, b.sealed)


def _int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
