"""Products with packed and dense weights: every form, kernel and shape against fp64, and what must not change a row."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from ktransformer2.kernels.attention import available_backends, use_backend
from ktransformer2.kernels.linear import (
    FEW_ROWS,
    CodedWeights,
    PackedForm,
    PackedMatrix,
    code_rows,
    multiply,
    multiply_dense,
    pack,
    tiles_shape,
)

FORMS: tuple[PackedForm, ...] = ("int8", "int4")
# [N, K]: whole tiles and groups, an odd tail of each, one of each, less than a group, and many tiles.
SHAPES = [(32, 64), (33, 70), (1, 1), (16, 31), (7, 160), (200, 96)]
ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 64, 65)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=available_backends())
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(form: PackedForm, n: int, k: int) -> CodedWeights:
    """Codes of every value they can have, scales of both signs; what lies behind K is not 0."""
    generator = torch.Generator().manual_seed(n * 1000 + k)
    groups = math.ceil(k / 32)
    codes = torch.randint(0, 256, (n, groups, 32 if form == "int8" else 16), generator=generator, dtype=torch.uint8)
    scales = torch.randn((n, groups, 1 if form == "int8" else 2), generator=generator).half()
    return CodedWeights(form, k, codes, scales)


def packed(weights: CodedWeights, bias: torch.Tensor | None = None) -> PackedMatrix:
    shape = tiles_shape(weights.form, weights.num_outputs, weights.num_inputs)
    return pack(weights, torch.full(shape, 255, dtype=torch.uint8), bias)


def relative_error(found: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest difference, as a share of the sum of the sizes of what was added up."""
    return float(((found.double() - exact).abs() / (scale + 1e-300)).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packed_products(form: PackedForm, n: int, k: int, backend: str) -> None:
    weights, bias = drawn(form, n, k), random(n, seed=1)
    matrix, w = packed(weights, bias), weights.values().double()
    x = random(max(ROWS), k, seed=2)
    codes, scales = code_rows(x)
    seen = (codes.double() * scales.double()[..., None]).flatten(1)[:, :k]  # the rows as the product sees them
    sizes = seen.abs() @ w.abs().T + bias.abs()
    whole = multiply(x, matrix)
    assert relative_error(whole, seen @ w.T + bias, sizes) < 1e-5
    half_a_step = x.abs().amax(1, keepdim=True) / 127 / 2
    assert ((whole - (x.double() @ w.T + bias)).abs() <= half_a_step * w.abs().sum(1) + 1e-4 * sizes).all()
    for rows in ROWS:  # a row's result does not depend on how many are beside it
        if backend == "reference":
            torch.testing.assert_close(multiply(x[:rows], matrix), whole[:rows])
        else:
            assert torch.equal(multiply(x[:rows], matrix), whole[:rows]), rows
            assert torch.equal(multiply(x[-rows:], matrix), whole[-rows:]), rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_and_go_in_their_own_dtype(form: PackedForm, dtype: torch.dtype, backend: str) -> None:
    matrix = packed(drawn(form, 33, 70))
    x = random(5, 140).to(dtype)
    for rows in (x[:, ::2], x[:, :70], x[:0, :70], x[::2, :70]):  # strided, and none at all
        found = multiply(rows, matrix)
        assert found.dtype == dtype
        assert found.shape == (len(rows), 33)
        torch.testing.assert_close(found, multiply(rows.float().contiguous(), matrix).to(dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_codes_do_not_overflow(form: PackedForm, sign: float, backend: str) -> None:
    extreme = [0x80, 0x7F] if form == "int8" else [0xFF, 0xF0]  # -128, 127; 15 | 15, 0 | 15
    codes = torch.tensor(extreme, dtype=torch.uint8)[:, None, None].repeat(1, 3, 32 if form == "int8" else 16)
    weights = CodedWeights(form, 96, codes, torch.ones(2, 3, 1 if form == "int8" else 2, dtype=torch.float16))
    x = torch.full((5, 96), sign)
    torch.testing.assert_close(multiply(x, packed(weights)), x @ weights.values().T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_seen_and_harms_no_other(form: PackedForm, value: float, backend: str) -> None:
    matrix, x = packed(drawn(form, 20, 70)), random(6, 70)
    before = multiply(x, matrix)
    x[2, 69] = value
    after = multiply(x, matrix)
    assert after[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_what_is_as_good_as_zero(form: PackedForm, backend: str) -> None:
    matrix = packed(drawn(form, 20, 70), random(20))
    for tiny in (0.0, 1e-38, 1e-44):
        torch.testing.assert_close(multiply(torch.full((2, 70), tiny), matrix), random(20).expand(2, 20))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("threads")
def test_threads_change_no_bit(form: PackedForm, backend: str) -> None:
    if backend == "reference":  # torch's matmul promises no such thing
        return
    matrix, x = packed(drawn(form, 1000, 512)), random(70, 512)
    torch.set_num_threads(1)
    one = multiply(x, matrix)
    torch.set_num_threads(2)
    assert torch.equal(multiply(x, matrix), one)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_was_packed_comes_out_again(form: PackedForm, n: int, k: int) -> None:
    weights = drawn(form, n, k)
    index = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    back = packed(weights).coded_rows(index)
    assert torch.equal(back.codes, weights.codes[index])
    assert torch.equal(back.scales, weights.scales[index])
    assert torch.equal(back.values(), weights.rows(index).values())


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dense_products(weight_dtype: torch.dtype, dtype: torch.dtype, n: int, k: int, backend: str) -> None:
    weight, bias = random(n, k).to(weight_dtype), random(n, seed=1)
    x = random(FEW_ROWS + 1, k, seed=2).to(dtype)
    exact, sizes = x.double() @ weight.double().T + bias, x.double().abs() @ weight.double().abs().T + bias.abs()
    most = 1e-6 if dtype == torch.float32 else 0.01
    for rows in (1, 2, 4, 5, FEW_ROWS, FEW_ROWS + 1, 0):
        found = multiply_dense(x[:rows], weight, bias)
        assert found.dtype == dtype
        assert found.shape == (rows, n)
        assert not rows or relative_error(found, exact[:rows], sizes[:rows]) < most
    if backend != "reference":  # up to FEW_ROWS a row's result does not depend on how many are beside it
        alone = torch.cat([multiply_dense(row[None], weight, bias) for row in x[:FEW_ROWS]])
        assert torch.equal(multiply_dense(x[:FEW_ROWS], weight, bias), alone)
