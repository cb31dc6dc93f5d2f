"""A decoder's rows on every backend: against formulas in fp64, and against the oracle to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ktransformer2.kernels import attention, reference
from ktransformer2.kernels.decoder import HeadNorms, Rotation, rms_norm, rotate_and_store, silu_multiply
from ktransformer2.layout import Form, LayerGroup, ModelGeometry
from tests.models.paged import PagedTexts

DTYPES = [torch.float32, torch.bfloat16]
# One rounding of bf16, or a few of fp32.
TOLERANCE = {torch.float32: (2e-6, 2e-7), torch.bfloat16: (2**-7, 1e-6)}  # relative, absolute
FORMS = {torch.float32: Form.FP32, torch.bfloat16: Form.BF16}


@pytest.fixture(params=attention.available_backends(), autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with attention.use_backend(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    relative, absolute = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 40, 7])
def test_a_norm_is_its_formula(dtype: torch.dtype, size: int) -> None:
    x, weight = drawn(5, size, dtype=dtype), drawn(size, dtype=dtype, seed=1)
    wide = x.double()
    expected = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    found = rms_norm(x, weight, 1e-5)
    assert_close(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_takes_the_row_in_and_its_sum_is_normed(dtype: torch.dtype) -> None:
    x, residual, weight = (drawn(3, 40, dtype=dtype, seed=seed) for seed in range(3))
    expected_sum = residual + x
    found = rms_norm(x, weight[0], 1e-5, residual)
    assert torch.equal(residual, expected_sum)
    assert torch.equal(found, rms_norm(expected_sum, weight[0], 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1536, 24, 5])
def test_a_gate_is_its_formula(dtype: torch.dtype, size: int) -> None:
    gate_up = drawn(4, 2 * size, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = (gate * gate.sigmoid()).to(dtype).double() * up  # rounded between, as two modules would
    assert_close(silu_multiply(gate_up), expected.to(dtype))


def test_what_is_no_number_stays_none() -> None:
    x = drawn(2, 40)
    x[1, 17] = torch.nan
    assert rms_norm(x, torch.ones(40), 1e-5).isnan().any(-1).tolist() == [False, True]
    assert silu_multiply(x).isnan().any(-1).tolist() == [False, True]


class Rows:
    """New rows of three sequences over H = 4 query and G = 2 KV heads of size D, and the pages they go to."""

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        group = LayerGroup((0, 1), 2, size, size)
        self.texts = PagedTexts(ModelGeometry((group,), FORMS[dtype], 256, (None,)), num_blocks=8)
        self.steps = [(self.texts.new_text(), list(range(n))) for n in (19, 1, 40)]
        (self.batch,) = self.texts.step(self.steps).kv
        qkv = drawn(60, 8, size, dtype=dtype)
        q, k, v = qkv.split_with_sizes((4, 2, 2), dim=1)
        self.qkv = q, k, v
        angles = drawn(60, size // 2, seed=1)
        self.rotation = Rotation(angles.cos().to(dtype).float(), angles.sin().to(dtype).float())
        self.norms = HeadNorms(drawn(size, dtype=dtype, seed=2), drawn(size, dtype=dtype, seed=3), 1e-6)

    def pages(self) -> list[torch.Tensor]:
        """K and V of all 60 tokens, [60, G, D] each, as the pages of layer 1 hold them."""
        gathered = reference.gather(self.qkv[1], self.qkv[2], self.batch, 1)
        return [torch.cat([each[i] for each in gathered], dim=1).transpose(0, 1) for i in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 24, 8])
def test_rotation_and_store_are_those_of_the_oracle(dtype: torch.dtype, size: int) -> None:
    ours, theirs = Rows(dtype, size), Rows(dtype, size)
    v = ours.qkv[2].clone()
    rotate_and_store(ours.qkv, ours.batch, 1, ours.rotation)
    reference.rotate_and_store(theirs.qkv, theirs.batch, 1, theirs.rotation, None)
    for mine, expected in zip(ours.qkv, theirs.qkv, strict=True):
        assert torch.equal(mine, expected)
    k_pages, v_pages = ours.pages()
    assert torch.equal(k_pages, theirs.qkv[1].float())
    assert torch.equal(v_pages, v.float())


def test_a_rotation_turns_pairs_of_channels_and_keeps_their_length() -> None:
    rows = Rows(torch.float32, 24)
    q, k, _ = (part.clone() for part in rows.qkv)
    rotate_and_store(rows.qkv, rows.batch, 1, rows.rotation)
    for before, after in ((q, rows.qkv[0]), (k, rows.qkv[1])):
        whole = torch.complex(*before.chunk(2, dim=-1))
        turned = whole * torch.complex(rows.rotation.cosines, rows.rotation.sines)[:, None]
        torch.testing.assert_close(torch.complex(*after.chunk(2, dim=-1)), turned)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_before_they_are_rotated(dtype: torch.dtype) -> None:
    ours, theirs = Rows(dtype, 24), Rows(dtype, 24)
    for rows, weight in zip(theirs.qkv, (theirs.norms.q_weight, theirs.norms.k_weight), strict=False):
        rows.copy_(rms_norm(rows.reshape(-1, 24), weight, 1e-6).view_as(rows))
    rotate_and_store(ours.qkv, ours.batch, 1, ours.rotation, ours.norms)
    rotate_and_store(theirs.qkv, theirs.batch, 1, theirs.rotation)
    for mine, expected in zip(ours.qkv, theirs.qkv, strict=True):
        assert torch.equal(mine, expected)


def test_threads_change_no_bit(threads: Callable[[int], None]) -> None:
    x, weight = drawn(600, 576), drawn(576, seed=1)
    found = []
    for number in (1, 2):
        threads(number)
        rows = Rows(torch.float32, 64)
        rotate_and_store(rows.qkv, rows.batch, 1, rows.rotation, rows.norms)
        found.append([rms_norm(x, weight, 1e-5), silu_multiply(x), *rows.qkv])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_rows_of_another_shape_or_type_are_a_programmers_error() -> None:
    x = drawn(4, 16)
    with pytest.raises(AssertionError, match=r"x has shape \(4, 16\), the weight \(8,\)"):
        rms_norm(x, torch.ones(8), 1e-5)
    with pytest.raises(AssertionError, match=r"residual has shape \(3, 16\), x has \(4, 16\)"):
        rms_norm(x, torch.ones(16), 1e-5, drawn(3, 16))
    with pytest.raises(AssertionError, match="not contiguous"):
        silu_multiply(x[:, ::2])
    rows = Rows(torch.float32, 8)
    short = Rotation(rows.rotation.cosines[:5], rows.rotation.sines[:5])
    with pytest.raises(AssertionError, match=r"angles \(5, 4\) for q \(60, 4, 8\)"):
        rotate_and_store(rows.qkv, rows.batch, 1, short)
