"""The torch oracle: `store_kv`, `seal`, `paged_attention` and a decoder's rows, said plainly, and fast enough to run a
model.

The keys and values that a sequence's queries see are laid out once per call in a fp32 buffer, one column per token.
Queries are taken block-table entry by entry: while an entry is the queries' own, its columns hold the rows as computed;
once they are done it takes its sealed form, which every later query sees. So the numerics rule needs no second mask.

Knows no thread and no instruction set. Unlike the native kernels it leaves the order of sums to torch, so that results
may differ in the last bits with the number of rows; all sums are fp32 whatever the dtype of q.
Invariant: rows outside an entry, released ones, and rows that nobody has written yet are never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ktransformer2.kernels.batch import AttentionParams, KVBatch
from ktransformer2.kernels.pages import Section, sections
from ktransformer2.kernels.rope import turn_back
from ktransformer2.layout import unpack_page

if TYPE_CHECKING:
    from ktransformer2.kernels.decoder import HeadNorms, Rotation

# Scores of one piece of a prefill: H x rows x columns x 4 bytes stay below this.
_SCORE_BYTES = 16 * 2**20


def store_kv(k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int) -> None:
    """Writes the new rows k [T, G, Dk] and v [T, G, Dv] into the pages of layer `column` that hold rows as computed.

    A block's rows go to its open page, else to its page-table page where both forms there are full, else nowhere:
    then the block becomes full in this step, and `seal` takes them from k and v.
    """
    for first, stop, block, offset in _slot_runs(batch):
        page = int(batch.open_table[block, column])
        if page == 0:
            page = int(batch.page_table[block, column])
        address, k_form, v_form = unpack_page(page)
        if not (k_form.is_full and v_form.is_full):
            continue
        for section, rows in zip(sections(batch.group, batch.block_tokens, k_form, v_form), (k, v), strict=True):
            section.full_rows(address)[:, offset : offset + stop - first] = rows[first:stop].transpose(0, 1)


def _slot_runs(batch: KVBatch) -> Iterator[tuple[int, int, int, int]]:
    """(first, stop, block, offset): rows first:stop of the step lie in one block from `offset` on."""
    slots, p = batch.slot_mapping.tolist(), batch.block_tokens
    first = 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[row - 1] + 1 or slots[row] % p == 0:
            yield first, row, slots[first] // p, slots[first] % p
            first = row


def seal(k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int) -> None:
    """Writes the sealed form of every block of `batch.seals` into its page-table page of layer `column`."""
    p = batch.block_tokens
    for block, row in batch.seals.tolist():
        target, k_form, v_form = unpack_page(int(batch.page_table[block, column]))
        assert target != 0, f"block {block} has no page in column {column} to be sealed into"
        targets = sections(batch.group, p, k_form, v_form)
        if row >= 0:
            rows = [x[row : row + p].transpose(0, 1) for x in (k, v)]  # [G, P, D]
        else:
            source, k_open, v_open = unpack_page(int(batch.open_table[block, column]))
            assert source != 0, f"block {block} has no open page in column {column} to be sealed from"
            rows = [section.full_rows(source) for section in sections(batch.group, p, k_open, v_open)]
        for section, values in zip(targets, rows, strict=True):
            section.write(target, values)


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int, params: AttentionParams
) -> torch.Tensor:
    """Attention of q [T, H, Dk] over what each query's block table shows of layer `column`: [T, H, Dv] in q's dtype.

    The new rows k and v must have been stored and sealed before. Side effects: none.
    """
    out = q.new_empty(q.shape[0], q.shape[1], batch.group.v_head_size)
    query_starts, context_lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    for s, seen in enumerate(context_lens):
        first, stop = query_starts[s], query_starts[s + 1]
        if first == stop:
            continue
        entries = _visible_entries(batch, s, seen + stop - first, params.window)
        view = _SequenceView(batch, column, entries, seen)
        view.load_as_computed(k[first:stop], v[first:stop])
        for entry in view.own:
            row, row_stop = max(entry.start, seen) - seen + first, entry.stop - seen + first
            out[row:row_stop] = _attend(q[row:row_stop].float(), view, max(entry.start, seen), params)
            if entry is not view.own[-1]:
                view.load_sealed([entry])
    return out


def gather(
    k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int, num_tokens: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per sequence K fp32 [G, N, Dk] and V fp32 [G, N, Dv] of layer `column`: what the block table shows, laid out.

    The step's own blocks are as computed, earlier ones in the form they have. `num_tokens`: only the last N tokens seen
    before the step, and those of the step; None: all. The new rows k and v must have been stored and sealed before.
    """
    views = []
    query_starts, context_lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    for s, seen in enumerate(context_lens):
        first, stop = query_starts[s], query_starts[s + 1]
        entries = _visible_entries(batch, s, seen + stop - first, None if num_tokens is None else num_tokens + 1)
        view = _SequenceView(batch, column, entries, seen)
        view.load_as_computed(k[first:stop], v[first:stop])
        oldest = 0 if num_tokens is None else max(0, seen - num_tokens)
        views.append((view.k[:, oldest - view.origin :], view.v[:, oldest - view.origin :]))
    return views


@dataclass(frozen=True)
class _Entry:
    """Logical tokens start:stop of a sequence, which lie in rows first_row... of `block`."""

    block: int
    start: int
    stop: int
    first_row: int
    shift: int


def _visible_entries(batch: KVBatch, s: int, total: int, window: int | None) -> list[_Entry]:
    """The entries of sequence s that a query of this step can see, cut to the tokens that exist after the step."""
    oldest = 0 if window is None else int(batch.context_lens[s]) - window + 1
    first, last = batch.entry_starts[s : s + 2].tolist()
    entries: list[_Entry] = []
    start = 0
    for block, first_row, rows, shift in batch.entries[first:last].tolist():
        stop = min(start + rows, total)
        if block >= 0 and stop > max(start, oldest):
            entries.append(_Entry(block, start, stop, first_row, shift))
        start += rows
    reached = entries[-1].stop if entries else 0
    assert reached == total, f"sequence {s} has {total} tokens with this step, its block table holds {reached}"
    return entries


class _SequenceView:
    """K fp32 [G, J, Dk] and V fp32 [G, J, Dv] as the queries of one sequence see them; column j is token `origin` + j.

    `released[j]` marks tokens that no query may see. `runs` are (start, stop, shift): tokens that were moved alike.
    """

    def __init__(self, batch: KVBatch, column: int, entries: list[_Entry], seen: int) -> None:
        self._batch, self._column = batch, column
        self.origin = entries[0].start
        self._seen = seen
        self.own = [entry for entry in entries if entry.stop > seen]
        g, tokens = batch.group, entries[-1].stop - self.origin
        self.k = torch.zeros(g.num_kv_heads, tokens, g.k_head_size)
        self.v = torch.zeros(g.num_kv_heads, tokens, g.v_head_size)
        self.released = torch.ones(tokens, dtype=torch.bool)
        self.runs: list[tuple[int, int, int]] = []
        for entry in entries:
            self.released[self._columns(entry)] = False
            if self.runs and self.runs[-1][2] == entry.shift:
                self.runs[-1] = (self.runs[-1][0], entry.stop, entry.shift)
            else:  # what was released before it goes with the new run, so that the runs leave no gap
                self.runs.append((self.runs[-1][1] if self.runs else self.origin, entry.stop, entry.shift))
        self.any_released = bool(self.released.any())
        sealed = [entry for entry in entries if entry.stop <= seen]
        if sealed:
            self.load_sealed(sealed)

    def _columns(self, entry: _Entry) -> slice:
        return slice(entry.start - self.origin, entry.stop - self.origin)

    def load_sealed(self, entries: list[_Entry]) -> None:
        """Lays out the page-table form of these entries."""
        by_form: dict[int, list[tuple[_Entry, int]]] = {}
        for entry, page in zip(entries, self._pages(self._batch.page_table, entries), strict=True):
            assert page != 0, f"block {entry.block} is read, but has no page in column {self._column}"
            by_form.setdefault(page & 63, []).append((entry, page & ~63))
        for form_bits, loaded in by_form.items():
            _, k_form, v_form = unpack_page(form_bits)
            parts = sections(self._batch.group, self._batch.block_tokens, k_form, v_form)
            for section, buffer in zip(parts, (self.k, self.v), strict=True):
                self._load_rows(section, loaded, buffer)

    def load_as_computed(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Lays out the entries that hold the new tokens; k and v are the sequence's new rows."""
        open_pages = self._pages(self._batch.open_table, self.own)
        for entry, open_page, sealed_page in zip(
            self.own, open_pages, self._pages(self._batch.page_table, self.own), strict=True
        ):
            address, k_form, v_form = unpack_page(open_page or sealed_page)
            if k_form.is_full and v_form.is_full:
                parts = sections(self._batch.group, self._batch.block_tokens, k_form, v_form)
                for section, buffer in zip(parts, (self.k, self.v), strict=True):
                    self._load_rows(section, [(entry, address)], buffer)
            else:
                assert entry.start >= self._seen, f"block {entry.block} was begun earlier, but has no page as computed"
                rows = slice(entry.start - self._seen, entry.stop - self._seen)
                self.k[:, self._columns(entry)] = k[rows].transpose(0, 1).float()
                self.v[:, self._columns(entry)] = v[rows].transpose(0, 1).float()

    def _pages(self, table: torch.Tensor, entries: list[_Entry]) -> list[int]:
        pages: list[int] = table[[entry.block for entry in entries], self._column].tolist()
        return pages

    def _load_rows(self, section: Section, loaded: list[tuple[_Entry, int]], buffer: torch.Tensor) -> None:
        rows = section.load([page for _, page in loaded])  # [G, N * P, D]
        # Column of the buffer minus column of `rows`: entries that share it and follow each other are copied at once.
        pieces: list[tuple[int, int, int]] = []
        for i, (entry, _) in enumerate(loaded):
            start, stop = entry.start - self.origin, entry.stop - self.origin
            behind = start - (i * section.block_tokens + entry.first_row)
            if pieces and pieces[-1][1:] == (start, behind):
                start = pieces.pop()[0]
            pieces.append((start, stop, behind))
        for start, stop, behind in pieces:
            buffer[:, start:stop] = rows[:, start - behind : stop - behind]


def _attend(q: torch.Tensor, view: _SequenceView, first: int, params: AttentionParams) -> torch.Tensor:
    """Attention fp32 [R, H, Dv] of consecutive queries q fp32 [R, H, Dk], the first of which is token `first`."""
    num_heads = q.shape[1]
    out = []
    rows_at_once = max(1, _SCORE_BYTES // (4 * num_heads * (first + q.shape[0] - view.origin)))
    for at in range(0, q.shape[0], rows_at_once):
        out.append(_attend_piece(q[at : at + rows_at_once], view, first + at, params))
    return torch.cat(out)


def _attend_piece(q: torch.Tensor, view: _SequenceView, first: int, params: AttentionParams) -> torch.Tensor:
    rows, num_heads, g = q.shape[0], q.shape[1], view.k.shape[0]
    oldest = view.origin if params.window is None else max(view.origin, first - params.window + 1)
    columns = slice(oldest - view.origin, first + rows - view.origin)
    scores = torch.cat(
        [
            # [G, R * H/G, Dk] x [G, Dk, J]
            _grouped(turn_back(q, shift, params.rope), g)
            @ view.k[:, max(start, oldest) - view.origin : min(stop, first + rows) - view.origin].transpose(1, 2)
            for start, stop, shift in view.runs
            if max(start, oldest) < min(stop, first + rows)
        ],
        dim=-1,
    ).mul_(params.scale)
    if params.softcap is not None:
        scores = scores.div_(params.softcap).tanh_().mul_(params.softcap)
    hidden = _hidden(rows, first, oldest, params.window)
    if view.any_released:
        hidden |= view.released[columns]
    scores = scores.view(g, rows, num_heads // g, -1).masked_fill_(hidden.unsqueeze(1), float("-inf"))
    weights = _softmax(scores, params.sinks)
    out = weights.flatten(1, 2) @ view.v[:, columns]  # [G, R * H/G, Dv]
    return out.view(g, rows, num_heads // g, -1).transpose(0, 1).reshape(rows, num_heads, -1)  # [R, H, Dv]


def _grouped(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[R, H, D] -> [G, R * H/G, D]: the queries that share a KV head, side by side."""
    rows, _, size = q.shape
    return q.reshape(rows, num_kv_heads, -1, size).transpose(0, 1).reshape(num_kv_heads, -1, size)


def _hidden(rows: int, first: int, oldest: int, window: int | None) -> torch.Tensor:
    """bool [R, J]: which of the tokens oldest... each of the queries first... must not see."""
    token = torch.arange(oldest, first + rows)
    query = torch.arange(first, first + rows).unsqueeze(1)
    hidden = token > query
    return hidden if window is None else hidden | (token <= query - window)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension of [G, R, H/G, J]; a sink is one more logit of its head that has no value."""
    if sinks is None:
        return scores.softmax(dim=-1)
    logit = sinks.float().view(scores.shape[0], 1, scores.shape[2], 1)
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True), logit)
    weights = scores.sub_(highest).exp_()
    return weights.div_(weights.sum(dim=-1, keepdim=True) + (logit - highest).exp())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """See `decoder.rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate_and_store(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: KVBatch,
    column: int,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> None:
    """See `decoder.rotate_and_store`."""
    q, k, v = qkv
    if norms is not None:
        q.copy_(rms_norm(q, norms.q_weight, norms.eps, None))
        k.copy_(rms_norm(k, norms.k_weight, norms.eps, None))
    for rows in (q, k):
        cos, sin = (angles[:, None].to(rows.dtype) for angles in (rotation.cosines, rotation.sines))  # [T, 1, D/2]
        first, second = rows.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        first.copy_(turned[0])
        second.copy_(turned[1])
    store_kv(k, v, batch, column)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `decoder.silu_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
