"""Every backend x form x shape x feature against plain loops in fp64, on pages between guard bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch

from ktransformer2.errors import ConfigError
from ktransformer2.kernels import attention
from ktransformer2.kernels.batch import AttentionParams
from ktransformer2.layout import Form, RopeSpec, pack_page, unpack_page
from tests.kernels.factories import (
    COLUMN,
    Forms,
    GrowingSequence,
    PageMemory,
    Piece,
    Plan,
    Scenario,
    Shape,
    build,
    raw_bytes,
)

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
    "multi-head": Shape(H=3, G=3, Dk=64, Dv=64, P=128),
    "smollm2": Shape(H=9, G=3, Dk=64, Dv=64, P=64),
    "multi-query": Shape(H=8, G=1, Dk=128, Dv=128, P=16),
    "h32-kv8": Shape(H=32, G=8, Dk=128, Dv=128, P=32),
    "d256": Shape(H=4, G=1, Dk=256, Dv=256, P=256),
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


@lru_cache(maxsize=4)
def case_of_feature(feature: str, form: str) -> tuple[Scenario, torch.Tensor]:
    """The scenario and what must come out; the backends, which vary fastest, take it in turn."""
    scenario = scenario_of_feature(feature, form)
    return scenario, scenario.expected(FEATURES[feature].params)


@lru_cache(maxsize=4)
def case_of_shape(shape: str, form: str) -> tuple[Scenario, torch.Tensor]:
    scenario = build(SHAPES[shape], FORMS[form], small_ragged(SHAPES[shape].P), seed=len(shape))
    return scenario, scenario.expected(params_of_shape(shape))


def scenario_of_feature(feature: str, form: str) -> Scenario:
    shape = Shape()
    return build(shape, FORMS[form], FEATURES[feature].plans(shape.P), seed=len(feature))


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


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with attention.use_backend(request.param):
        yield request.param


on_every_backend = pytest.mark.parametrize("backend", attention.available_backends(), indirect=True)


@on_every_backend
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(backend: str, shape: str, form: str) -> None:
    scenario, expected = case_of_shape(shape, form)
    check(scenario, run(scenario.reset(), params_of_shape(shape)), expected)


@on_every_backend
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(backend: str, feature: str, form: str) -> None:
    scenario, expected = case_of_feature(feature, form)
    check(scenario, run(scenario.reset(), FEATURES[feature].params), expected, FEATURES[feature].tolerance_ratio)


@pytest.mark.parametrize("form", FORMS)
@on_every_backend
def test_the_size_of_the_chunks_changes_nothing(backend: str, form: str) -> None:
    """Prefill at once, in chunks that end inside blocks, and token by token."""
    shape, params = Shape(H=6, G=2, Dk=64, Dv=64, P=16), AttentionParams(scale=0.125)
    num_tokens = 12 * shape.P + 5
    at_once = in_chunks(shape, form, [num_tokens], params)
    for chunks in ([50, 30, 64, 1, num_tokens - 145], [shape.P] * 12 + [5], [150] + [1] * (num_tokens - 150)):
        assert_same(in_chunks(shape, form, chunks, params), at_once, backend)


def in_chunks(shape: Shape, form: str, chunks: list[int], params: AttentionParams) -> torch.Tensor:
    sequence = GrowingSequence(shape, FORMS[form], sum(chunks))
    out = []
    for n in chunks:
        rows, batch = slice(sequence.seen, sequence.seen + n), sequence.batch(n)
        q, k, v = sequence.q[rows], sequence.k[rows], sequence.v[rows]
        attention.store_kv(k, v, batch, COLUMN)
        attention.seal(k, v, batch, COLUMN)
        out.append(attention.paged_attention(q, k, v, batch, COLUMN, params))
        sequence.computed(n)
    return torch.cat(out)


def assert_same(got: torch.Tensor, expected: torch.Tensor, backend: str) -> None:
    """The native kernels add in a fixed order; the oracle leaves the order to torch, which looks at the row count."""
    if backend == "reference":
        torch.testing.assert_close(got, expected, rtol=8e-3 if got.dtype != torch.float32 else 1e-4, atol=1e-5)
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature", ["ragged", "window-sinks-softcap", "shift", "released", "long-decodes"])
@on_every_backend
def test_a_sequence_alone_equals_itself_in_a_batch(backend: str, feature: str, form: str) -> None:
    scenario, params = scenario_of_feature(feature, form), FEATURES[feature].params
    together = run(scenario, params)
    batch, out = scenario.batch, []
    for s in range(batch.context_lens.shape[0]):
        rows = slice(*batch.query_starts[s : s + 2].tolist())
        entries = slice(*batch.entry_starts[s : s + 2].tolist())
        alone = replace(
            batch,
            slot_mapping=batch.slot_mapping[rows],
            query_starts=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            context_lens=batch.context_lens[s : s + 1],
            entry_starts=torch.tensor([0, entries.stop - entries.start], dtype=torch.int32),
            entries=batch.entries[entries],
            seals=batch.seals[:0],
        )
        q, k, v = scenario.q[rows], scenario.k[rows], scenario.v[rows]
        out.append(attention.paged_attention(q, k, v, alone, COLUMN, params))
    assert_same(torch.cat(out), together, backend)


@pytest.mark.parametrize("form", ["fp32", "int8-of-bf16"])
@pytest.mark.parametrize("threads", [2, 3])
@on_every_backend
def test_threads(backend: str, form: str, threads: int) -> None:
    """The result does not depend on how many threads share the work; long enough that they do."""
    shape = Shape(H=8, G=2, Dk=64, Dv=64, P=64)
    plans = (Plan(new=1, earlier=(Piece(64),) * 40, begun=Piece(3)), Plan(new=200, earlier=(Piece(64),) * 9))
    scenario, params = build(shape, FORMS[form], plans), AttentionParams(scale=0.125)
    one = run(scenario, params)
    torch.set_num_threads(threads)
    assert_same(run(scenario, params), one, backend)


@pytest.mark.parametrize("form", FORMS)
@on_every_backend
def test_moving_every_page_changes_not_a_bit(backend: str, form: str) -> None:
    scenario, params = scenario_of_feature("rollback", form), FEATURES["rollback"].params
    before = run(scenario, params)
    memory = PageMemory(2**20)
    batch = replace(
        scenario.batch, page_table=scenario.batch.page_table.clone(), open_table=scenario.batch.open_table.clone()
    )
    for table in (batch.page_table, batch.open_table):
        for block in reversed(range(table.shape[0])):
            entry = int(table[block, COLUMN])
            if entry:
                layout, (old, k_form, v_form) = scenario.layout_of(entry), unpack_page(entry)
                new = memory.page(layout, block % 3)
                raw_bytes(new, layout.page_bytes)[:] = raw_bytes(old, layout.page_bytes)
                raw_bytes(old, layout.page_bytes)[:] = 0xFF
                table[block, COLUMN] = pack_page(new, k_form, v_form)
    after = attention.paged_attention(scenario.q, scenario.k, scenario.v, batch, COLUMN, params)
    assert torch.equal(after, before)


@on_every_backend
def test_a_row_that_is_not_finite_spoils_only_its_own_sequence(backend: str) -> None:
    params = PLAIN
    clean = run(scenario_of_feature("ragged", "int8-of-fp32"), params)
    scenario = scenario_of_feature("ragged", "int8-of-fp32")
    starts = scenario.batch.query_starts.tolist()
    scenario.k[starts[2] + 1, 0, 5] = torch.nan
    scenario.v[starts[2] + 3, 1, 7] = torch.inf
    got = run(scenario, params)
    scenario.memory.check_guards()
    others = [row for row in range(starts[-1]) if not starts[2] <= row < starts[3]]
    assert torch.equal(got[others], clean[others])
    assert got[starts[2] + 1, 0].isnan().all()


@on_every_backend
@pytest.mark.parametrize("form", ["fp32", "int8-of-bf16"])
def test_rows_that_are_only_allotted_are_not_read(backend: str, form: str) -> None:
    """A block table may reach past the step's tokens: over the rest of the filling block, and a still empty one."""
    scenario, expected = case_of_feature("ragged", form)
    batch = scenario.batch
    starts, entries = batch.entry_starts.tolist(), []
    for first, stop in pairwise(starts):
        block, first_row, _, shift = batch.entries[stop - 1].tolist()
        entries += batch.entries[first : stop - 1].tolist()
        entries += [[block, first_row, batch.block_tokens - first_row, shift], [0, 0, batch.block_tokens, 0]]
    reaching = replace(
        batch,
        entries=torch.tensor(entries, dtype=torch.int32),
        entry_starts=batch.entry_starts + torch.arange(len(starts), dtype=torch.int32),
    )
    check(scenario, run(replace(scenario.reset(), batch=reaching), PLAIN), expected)


@on_every_backend
def test_a_sequence_without_new_tokens_is_skipped(backend: str) -> None:
    scenario = build(Shape(), FORMS["int8-of-bf16"], (Plan(new=3), Plan(new=0, earlier=(Piece(16),)), Plan(new=2)))
    check(scenario, run(scenario, PLAIN), scenario.expected(PLAIN))


@on_every_backend
def test_rows_may_be_views_of_a_larger_tensor(backend: str) -> None:
    """q, k and v as a model makes them: slices of one projection, heads transposed."""
    scenario = scenario_of_feature("ragged", "int8-of-bf16")
    expected = run(scenario, PLAIN)
    again = scenario_of_feature("ragged", "int8-of-bf16")
    packed = torch.cat([again.q, again.k, again.v], dim=1)  # [T, H + 2 * G, D]
    again.q, again.k, again.v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    again.k = again.k.transpose(0, 1).contiguous().transpose(0, 1)
    assert not again.k.is_contiguous()
    assert torch.equal(run(again, PLAIN), expected)
    again.check_sealed_pages()


def test_the_environment_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_KERNELS", "reference")
    assert attention.backend_name() == "reference"
    with attention.use_backend(attention.available_backends()[0]):
        assert attention.backend_name() == attention.available_backends()[0]
    assert attention.backend_name() == "reference"
    monkeypatch.delenv("KTRANSFORMER_KERNELS")
    assert attention.backend_name() == attention.available_backends()[0]


def test_an_unknown_backend_is_an_error_that_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_KERNELS", "sse9")
    with pytest.raises(ConfigError, match=r"KTRANSFORMER_KERNELS='sse9'.*avx512, avx2, portable, reference"):
        attention.backend_name()
    with pytest.raises(ConfigError, match="'mmx'"), attention.use_backend("mmx"):
        pass


def test_a_backend_that_cannot_run_here_is_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "available_backends", lambda: ("portable", "reference"))
    with (
        pytest.raises(ConfigError, match=r"'avx512' cannot run here.*portable, reference"),
        attention.use_backend("avx512"),
    ):
        pass


@on_every_backend
def test_wrong_arguments_are_found_before_memory_is_touched(backend: str) -> None:
    s = scenario_of_feature("ragged", "fp32")
    wrong_k = [
        s.k[:-1],
        s.k[:, :1],
        s.k[..., :-8],
        s.k.double(),
        s.k.half(),
        s.k.transpose(1, 2).contiguous().transpose(1, 2),
    ]
    for k in wrong_k:
        for call in (attention.store_kv, attention.seal):
            with pytest.raises(AssertionError):
                call(k, s.v, s.batch, COLUMN)
    for column in (-1, 2):
        with pytest.raises(AssertionError, match="column"):
            attention.store_kv(s.k, s.v, s.batch, column)
    with pytest.raises(AssertionError, match=r"entries is torch\.int64"):
        attention.seal(s.k, s.v, replace(s.batch, entries=s.batch.entries.long()), COLUMN)
    wrong_q: list[tuple[torch.Tensor, AttentionParams]] = [
        (s.q[:, :3], PLAIN),
        (s.q[:-1], PLAIN),
        (s.q.half(), PLAIN),
        (s.q, AttentionParams(scale=1, sinks=sinks(3))),
        (s.q, AttentionParams(scale=1, rope=half_split(64))),
        (s.q, AttentionParams(scale=1, window=0)),
    ]
    for q, params in wrong_q:
        with pytest.raises(AssertionError):
            attention.paged_attention(q, s.k, s.v, s.batch, COLUMN, params)
    s.memory.check_guards()
