"""Pages and extents in bytes, and the views that the oracle takes of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ktransformer2.kernels.pages import gather_bytes, sections
from ktransformer2.layout import (
    BLOCK_TOKENS_ALLOWED,
    ExtentLayout,
    Form,
    LayerGroup,
    PageLayout,
    pack_page,
    unpack_page,
)
from tests.kernels.factories import PageMemory, raw_bytes, read_back, write_page

FORMS = [Form.FP32, Form.BF16, Form.FP16, Form.INT8]
FORM_PAIRS = list(itertools.product(FORMS, FORMS))
SMOLLM2 = LayerGroup(tuple(range(30)), 3, 64, 64)


@given(st.integers(0, 2**57 - 1), st.sampled_from(list(Form)), st.sampled_from(list(Form)))
def test_a_page_table_entry_holds_address_and_forms(line: int, k_form: Form, v_form: Form) -> None:
    entry = pack_page(line * 64, k_form, v_form)
    assert entry < 2**63
    assert unpack_page(entry) == (line * 64, k_form, v_form)


def test_an_unaligned_page_is_refused() -> None:
    with pytest.raises(AssertionError, match="0x1020"):
        pack_page(0x1020, Form.FP32, Form.FP32)


@given(
    st.integers(1, 16),
    st.integers(1, 32),
    st.integers(1, 32),
    st.sampled_from(BLOCK_TOKENS_ALLOWED),
    st.sampled_from(FORM_PAIRS),
)
def test_sections_lie_apart_on_lines(g: int, dk8: int, dv8: int, p: int, forms: tuple[Form, Form]) -> None:
    layout = PageLayout(g, 8 * dk8, 8 * dv8, p, *forms)
    k_bytes, v_bytes = g * p * 8 * dk8 * forms[0].element_bytes, g * p * 8 * dv8 * forms[1].element_bytes
    k_scale_bytes, v_scale_bytes = (0 if form.is_full else g * p * 2 for form in forms)
    offsets = (0, layout.k_scale_offset, layout.v_offset, layout.v_scale_offset, layout.page_bytes)
    assert all(offset % 64 == 0 for offset in offsets)
    for (start, stop), size in zip(
        itertools.pairwise(offsets), (k_bytes, k_scale_bytes, v_bytes, v_scale_bytes), strict=True
    ):
        assert size <= stop - start < size + 64


def test_bytes_of_smollm2() -> None:
    int8, bf16 = (ExtentLayout.uniform(SMOLLM2, 64, form) for form in (Form.INT8, Form.BF16))
    assert bf16.extent_bytes == 64 * 23_040 == 1_474_560
    assert int8.pages[0].page_bytes == 2 * (3 * 64 * 64 + 3 * 64 * 2) == 25_344
    assert int8.extent_bytes == 761_856  # 30 pages are 760,320 bytes, rounded up to 4,096
    assert int8.extent_bytes / bf16.extent_bytes < 0.525


def test_an_extents_pages_follow_each_other() -> None:
    group = LayerGroup((0, 1, 2), 2, 40, 24)
    forms = ((Form.INT8, Form.INT8), (Form.BF16, Form.BF16), (Form.INT8, Form.BF16))
    extent = ExtentLayout(group, 32, forms)
    base = 0x7F00_0000_0000
    at = base
    for entry, page, pair in zip(extent.entries(base), extent.pages, forms, strict=True):
        assert unpack_page(entry) == (at, *pair)
        at += page.page_bytes
    assert at - base <= extent.extent_bytes < at - base + 4096


@pytest.mark.parametrize("forms", FORM_PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.parametrize(("p", "g", "dk", "dv"), [(16, 1, 8, 24), (32, 3, 40, 16), (64, 2, 64, 96)])
def test_views_read_and_write_what_the_layout_says(p: int, g: int, dk: int, dv: int, forms: tuple[Form, Form]) -> None:
    layout = PageLayout(g, dk, dv, p, *forms)
    memory = PageMemory(8 * layout.page_bytes + 4096)
    k_section, v_section = sections(LayerGroup((0,), g, dk, dv), p, *forms)
    generator = torch.Generator().manual_seed(p)
    rows = [(torch.randn(p, g, dk, generator=generator), torch.randn(p, g, dv, generator=generator)) for _ in range(3)]
    by_hand, by_section = ([memory.page(layout, i) for i in range(3)] for _ in range(2))
    for (k, v), hand, other in zip(rows, by_hand, by_section, strict=True):
        write_page(hand, layout, k, v)
        k_section.write(other, k.transpose(0, 1))
        v_section.write(other, v.transpose(0, 1))
        assert (raw_bytes(hand, layout.page_bytes) == raw_bytes(other, layout.page_bytes)).all()
    memory.check_guards()
    for section, form, which in ((k_section, forms[0], 0), (v_section, forms[1], 1)):
        order = [2, 0, 1]
        want = torch.cat([read_back(rows[i][which], form) for i in order]).transpose(0, 1)  # [G, 3 * P, D]
        torch.testing.assert_close(section.load([by_hand[i] for i in order]), want.float(), rtol=2e-7, atol=0)
        assert torch.equal(section.load(by_hand[:1]), section.load(by_hand)[:, :p])


def test_gather_copies_lines_in_the_order_asked_for() -> None:
    memory = PageMemory(4096)
    layout = PageLayout(1, 8, 8, 16, Form.INT8, Form.INT8)
    addresses = [memory.page(layout, i) for i in range(3)]
    for i, address in enumerate(addresses):
        raw_bytes(address, 128)[:] = range(i, i + 128)
    got = gather_bytes([addresses[2], addresses[0], addresses[2]], 128)
    assert got.tolist() == [list(range(i, i + 128)) for i in (2, 0, 2)]
