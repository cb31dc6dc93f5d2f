"""Every backend x form x shape x feature against plain loops in fp64, on pages between guard bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from tests.kernels.factories import COLUMN, Forms, Piece, Plan, Scenario, Shape, build

from ktransformer2.kernels import attention
from ktransformer2.kernels.batch import AttentionParams
from ktransformer2.layout import Form, RopeSpec

FORMS = {
    "fp32": Forms(Form.FP32, Form.FP32, Form.FP32),
    "bf16": Forms(Form.BF16, Form.BF16, Form.BF16),
    "fp16": Forms(Form.FP16, Form.FP16, Form.FP16),
    "int8-of-fp32": Forms(Form.FP32, Form.INT8, Form.INT8),
    "int8-of-bf16": Forms(Form.BF16, Form.INT8, Form.INT8),
    "int8-keys": Forms(Form.FP16, Form.INT8, Form.FP16),
    "int8-values": Forms(Form.FP32, Form.FP32, Form.INT8),
}
# Norm of the difference over norm of the reference, per head. The result's own rounding is 2^-9 in bf16, 2^-12 in fp16.
TOLERANCE = {Form.FP32: 3e-6, Form.FP16: 4e-4, Form.BF16: 4e-3}
NATIVE_INT8_TOLERANCE = 2e-3  # query and probabilities as two 8-bit terms

SHAPES = {
    "one-head": Shape(H=1, G=1, Dk=32, Dv=32, P=16),
    "multi-head": Shape(H=3, G=3, Dk=64, Dv=64, P=32),
    "smollm2": Shape(H=9, G=3, Dk=64, Dv=64, P=64),
    "multi-query": Shape(H=8, G=1, Dk=128, Dv=128, P=16),
    "h32-kv8": Shape(H=32, G=8, Dk=128, Dv=128, P=128),
    "d256": Shape(H=4, G=2, Dk=256, Dv=256, P=256),
    "values-narrower": Shape(H=4, G=2, Dk=96, Dv=64, P=32),
    "values-wider": Shape(H=6, G=2, Dk=40, Dv=72, P=16),
}


PLAIN = AttentionParams(scale=0.2)


@dataclass(frozen=True)
class Feature:
    """Sequences for a shape, and the attention that is run on them.

    `tolerance_ratio`: how much the result grows an error of the scores.
    """

    plans: Callable[[int], tuple[Plan, ...]]  # of block tokens
    params: AttentionParams = PLAIN
    tolerance_ratio: float = 1


def ragged(p: int) -> tuple[Plan, ...]:
    """A fresh prefill over blocks, a decode, a chunk behind a prefix, a single first token, a block that just fills."""
    return (
        Plan(new=2 * p + 3),
        Plan(new=1, earlier=(Piece(p),) * 3, begun=Piece(5)),
        Plan(new=p + 1, earlier=(Piece(p),), begun=Piece(7)),
        Plan(new=1),
        Plan(new=1, earlier=(Piece(p),), begun=Piece(p - 1)),
    )


def small_ragged(p: int) -> tuple[Plan, ...]:
    """Few queries, for large blocks: a decode over blocks, a chunk that fills one block and begins the next."""
    return (
        Plan(new=1, earlier=(Piece(p), Piece(p)), begun=Piece(3)),
        Plan(new=12, earlier=(Piece(p),), begun=Piece(p - 5)),
        Plan(new=p) if p <= 64 else Plan(new=9),
    )


def half_split(size: int) -> RopeSpec:
    return RopeSpec(tuple(100.0 ** (-i / (size // 2)) for i in range(size // 2)))


def shifted(p: int) -> tuple[Plan, ...]:
    """Segments that were moved there and back, a moved filling block, and runs of equal shift."""
    return (
        Plan(
            new=2 * p + 2,
            earlier=(Piece(p), Piece(p, shift=-37), Piece(p, shift=-37), Piece(p, shift=411)),
            begun=Piece(4, shift=411),
        ),
        Plan(new=1, earlier=(Piece(p, shift=-5), Piece(p)), begun=Piece(2)),
    )


def partial(p: int) -> tuple[Plan, ...]:
    """Parts of blocks: heads, tails and middles, and a filling block of which the first rows are not used."""
    return (
        Plan(new=p, earlier=(Piece(3), Piece(p - 6, first_row=6), Piece(1, first_row=p - 1), Piece(p))),
        Plan(new=3, earlier=(Piece(p - 1, first_row=1),), begun=Piece(2, first_row=5)),
    )


def released(p: int) -> tuple[Plan, ...]:
    gone = Piece(p, released=True)
    return (
        Plan(new=p + 3, earlier=(gone, gone, Piece(p)), begun=Piece(5)),
        Plan(new=1, earlier=(Piece(p), gone, Piece(p, shift=3), gone, Piece(p)), begun=Piece(1)),
    )


def rollback(p: int) -> tuple[Plan, ...]:
    """Sealed blocks that keep their rows as computed, and blocks that are sealed from their open page."""
    return (
        Plan(new=1, earlier=(Piece(p, kept_open=True), Piece(p, kept_open=True)), begun=Piece(1)),
        Plan(new=2 * p + 1, earlier=(Piece(p), Piece(p, kept_open=True)), begun=Piece(3), open_fresh=True),
    )


def long_decodes(p: int) -> tuple[Plan, ...]:
    """More than one partial sum of entries, with the boundary in different places."""
    return tuple(Plan(new=1, earlier=(Piece(p),) * n, begun=Piece(1) if n % 2 else None) for n in (7, 8, 9, 16, 21))


def sinks(num_heads: int) -> torch.Tensor:
    return torch.linspace(-3, 5, num_heads)


FEATURES = {
    "ragged": Feature(ragged),
    "window": Feature(ragged, AttentionParams(scale=0.2, window=19)),
    "window-of-one": Feature(ragged, AttentionParams(scale=0.2, window=1)),
    "softcap": Feature(ragged, AttentionParams(scale=0.7, softcap=4.0)),
    "sinks": Feature(ragged, AttentionParams(scale=0.2, sinks=sinks(4))),
    "window-sinks-softcap": Feature(ragged, AttentionParams(scale=0.5, window=33, softcap=9.0, sinks=sinks(4))),
    "shift": Feature(shifted, AttentionParams(scale=0.2, rope=half_split(32))),
    "shift-partial-rotary": Feature(shifted, AttentionParams(scale=0.2, rope=half_split(16))),
    "shift-interleaved": Feature(shifted, AttentionParams(scale=0.2, rope=replace(half_split(24), interleaved=True))),
    "shift-without-rope": Feature(shifted),
    "shift-window-softcap": Feature(shifted, AttentionParams(scale=0.5, window=29, softcap=5.0, rope=half_split(32))),
    "partial": Feature(partial),
    "partial-window": Feature(partial, AttentionParams(scale=0.2, window=21)),
    "released": Feature(released, AttentionParams(scale=0.2, window=2 * 16, rope=half_split(32))),
    "released-no-window": Feature(released, AttentionParams(scale=0.2, sinks=sinks(4))),
    "rollback": Feature(rollback),
    "long-decodes": Feature(long_decodes),
    "large-scores": Feature(ragged, AttentionParams(scale=12.0), tolerance_ratio=60),
}


@cache
def expected_of_feature(feature: str, form: str) -> torch.Tensor:
    return scenario_of_feature(feature, form).expected(FEATURES[feature].params)


def scenario_of_feature(feature: str, form: str) -> Scenario:
    shape = Shape()
    return build(shape, FORMS[form], FEATURES[feature].plans(shape.P), seed=len(feature))


@cache
def expected_of_shape(shape: str, form: str) -> torch.Tensor:
    return scenario_of_shape(shape, form).expected(params_of_shape(shape))


def scenario_of_shape(shape: str, form: str) -> Scenario:
    return build(SHAPES[shape], FORMS[form], small_ragged(SHAPES[shape].P), seed=len(shape))


def params_of_shape(shape: str) -> AttentionParams:
    return AttentionParams(scale=SHAPES[shape].Dk ** -0.5)


def run(scenario: Scenario, params: AttentionParams) -> torch.Tensor:
    s = scenario
    attention.store_kv(s.k, s.v, s.batch, COLUMN)
    attention.seal(s.k, s.v, s.batch, COLUMN)
    return attention.paged_attention(s.q, s.k, s.v, s.batch, COLUMN, params)


def check(scenario: Scenario, got: torch.Tensor, expected: torch.Tensor, tolerance_ratio: float = 1) -> None:
    assert got.dtype == scenario.q.dtype
    assert got.shape == expected.shape
    difference = (got.double() - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
    tolerance = TOLERANCE[scenario.forms.full]
    if attention.backend_name() != "reference" and not scenario.forms.sealed_is_full:
        tolerance = max(tolerance, NATIVE_INT8_TOLERANCE)
    tolerance *= tolerance_ratio
    assert difference.max() <= tolerance, f"relative error per head {difference.tolist()}"
    scenario.memory.check_guards()
    scenario.check_sealed_pages()
    scenario.check_other_layer()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread only waits. `test_threads` asks for more itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=attention.available_backends())
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with attention.use_backend(request.param):
        yield request.param


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(backend: str, shape: str, form: str) -> None:
    scenario = scenario_of_shape(shape, form)
    check(scenario, run(scenario, params_of_shape(shape)), expected_of_shape(shape, form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(backend: str, feature: str, form: str) -> None:
    scenario = scenario_of_feature(feature, form)
    expected, ratio = expected_of_feature(feature, form), FEATURES[feature].tolerance_ratio
    check(scenario, run(scenario, FEATURES[feature].params), expected, ratio)
