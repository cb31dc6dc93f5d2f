"""Int8 rows: error bounds and round trips, and the rows that must not crash anything."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformer2.kernels.quantize import (
    dequantize,
    pack_keys,
    pack_values,
    quantize,
    unpack_keys,
    unpack_values,
)
from tests.kernels.factories import key_code_index, quantised, value_code_index

SMALLEST_NORMAL_SCALE = 2.0**-14  # of fp16; below it a scale itself is coarse


@st.composite
def rows(draw: st.DrawFn, largest: float = 1e6) -> torch.Tensor:
    """Rows [N, D] whose sizes differ by many orders of magnitude, some of them zero, some in bf16."""
    n, d, seed = draw(st.integers(1, 9)), draw(st.sampled_from([8, 40, 64, 256])), draw(st.integers(0, 2**31))
    sizes = draw(st.lists(st.floats(0, largest, width=32), min_size=n, max_size=n))
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).clamp(-4, 4)
    x *= torch.tensor(sizes).unsqueeze(1)
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@st.composite
def codes(draw: st.DrawFn) -> torch.Tensor:
    """Codes [G, P, D] of every page shape."""
    g, p = draw(st.integers(1, 4)), draw(st.sampled_from([16, 32, 64, 128, 256]))
    d, seed = 8 * draw(st.integers(1, 32)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (g, p, d), generator=generator, dtype=torch.int8)


@settings(deadline=None, max_examples=40)
@given(rows())
def test_error_is_at_most_half_a_step(x: torch.Tensor) -> None:
    code, scale = quantize(x)
    assert code.dtype == torch.int8
    assert scale.dtype == torch.float16
    error = (dequantize(code, scale).double() - x.double()).abs()
    # Below the normal range fp16 rounds a scale by up to 2^-25, and 127 of them by 127 times that.
    step = torch.where(
        scale >= SMALLEST_NORMAL_SCALE, scale.double() * 0.5000001, 0.5 * scale.double() + 128 * 2.0**-25
    )
    assert (error <= step.unsqueeze(1)).all()


@settings(deadline=None, max_examples=40)
@given(rows())
def test_every_row_by_itself_gives_the_same_codes(x: torch.Tensor) -> None:
    code, scale = quantize(x)
    for i in range(x.shape[0]):
        want_codes, want_scale = quantised(x[i : i + 1].double().numpy())
        np.testing.assert_array_equal(code[i].numpy(), want_codes[0])
        assert scale[i].item() == want_scale[0]


@settings(deadline=None, max_examples=40)
@given(rows())
def test_the_sign_is_symmetric_and_a_code_is_never_minus_128(x: torch.Tensor) -> None:
    code, scale = quantize(x)
    mirrored, same_scale = quantize(-x)
    assert torch.equal(mirrored, -code)
    assert torch.equal(same_scale, scale)
    assert code.min() >= -127


@settings(deadline=None, max_examples=40)
@given(rows(largest=1e3))
def test_quantising_what_was_quantised_changes_nothing(x: torch.Tensor) -> None:
    code, scale = quantize(x)
    full = (code.abs().amax(dim=1) == 127) & (scale >= SMALLEST_NORMAL_SCALE)
    again, same_scale = quantize(dequantize(code, scale))
    assert torch.equal(again[full], code[full])
    assert torch.equal(same_scale[full], scale[full])


@settings(deadline=None, max_examples=40)
@given(codes())
def test_tiles_round_trip_and_lie_where_the_layout_says(code: torch.Tensor) -> None:
    keys, values = pack_keys(code), pack_values(code)
    g, p, d = code.shape
    assert keys.shape == (g, p // 16, d // 4, 16, 4)
    assert values.shape == (g, p // 4, d, 4)
    assert torch.equal(unpack_keys(keys), code)
    assert torch.equal(unpack_values(values), code)
    np.testing.assert_array_equal(keys.flatten().numpy()[key_code_index(g, p, d)], code.numpy())
    np.testing.assert_array_equal(values.flatten().numpy()[value_code_index(g, p, d)], code.numpy())


def test_leading_dimensions_are_kept() -> None:
    code = torch.arange(2 * 3 * 16 * 8).remainder(127).to(torch.int8).view(2, 3, 16, 8)
    assert torch.equal(unpack_keys(pack_keys(code)), code)
    assert torch.equal(pack_keys(code)[1], pack_keys(code[1]))
    assert torch.equal(pack_values(code)[1], pack_values(code[1]))


def test_zero_and_vanishing_rows_have_scale_and_codes_zero() -> None:
    code, scale = quantize(torch.stack([torch.zeros(8), torch.full((8,), 1e-7), torch.full((8,), -0.0)]))
    assert scale.tolist() == [0, 0, 0]
    assert not code.any()
    assert not dequantize(code, scale).any()


def test_a_known_row() -> None:
    code, scale = quantize(torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, 63.4, 0.0]))
    assert scale.item() == 1
    assert code.tolist() == [127, -127, 0, 2, 2, 0, 63, 0]  # halves go to the even neighbour


def test_rows_that_are_not_finite_read_back_as_nan_and_leave_their_neighbours_alone() -> None:
    x = torch.ones(5, 8)
    x[1, 3], x[2, 0], x[3, 7] = torch.nan, torch.inf, 1e9  # 1e9 / 127 is beyond fp16
    code, scale = quantize(x)
    back = dequantize(code, scale)
    assert back[[1, 2, 3]].isnan().any(dim=1).all()
    assert torch.equal(back[[0, 4]], dequantize(*quantize(torch.ones(2, 8))))
