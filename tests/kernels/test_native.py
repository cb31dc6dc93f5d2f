"""What only the C++ kernels promise: results to the last bit, one OpenMP runtime, instruction sets by name."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformer2.errors import ConfigError
from ktransformer2.kernels import attention
from ktransformer2.kernels.batch import AttentionParams, KVBatch
from ktransformer2.layout import Form, LayerGroup, PageLayout, RopeSpec, pack_page

cpu = pytest.importorskip("ktransformer2.kernels.cpu", reason="the extension is not built", exc_type=ImportError)

PLAIN = AttentionParams(scale=0.125)
DTYPES = {Form.FP32: torch.float32, Form.BF16: torch.bfloat16, Form.FP16: torch.float16}


@pytest.fixture(params=cpu.available_targets())
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.select_target(request.param)
    yield request.param
    cpu.select_target(cpu.available_targets()[0])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """H query heads over G KV heads of size D, P block tokens, the model's form and that of sealed pages."""

    H: int
    G: int
    D: int
    P: int
    full: Form
    sealed: Form
    params: AttentionParams = PLAIN


CASES = {
    "int8": Case(9, 3, 64, 64, Form.FP32, Form.INT8),
    "int8-one-row": Case(2, 2, 40, 16, Form.FP16, Form.INT8),
    "int8-large-blocks": Case(14, 2, 32, 256, Form.BF16, Form.INT8),
    "fp32": Case(4, 2, 64, 32, Form.FP32, Form.FP32),
    "bf16": Case(8, 1, 72, 16, Form.BF16, Form.BF16),
    "window": Case(6, 2, 32, 16, Form.FP32, Form.INT8, AttentionParams(scale=0.2, window=41)),
    "softcap-sinks": Case(
        4, 2, 32, 16, Form.BF16, Form.INT8, AttentionParams(0.5, softcap=5.0, sinks=torch.tensor([1.0, -2.0, 0.0, 9.0]))
    ),
    "shifts": Case(
        4,
        2,
        32,
        16,
        Form.FP32,
        Form.INT8,
        AttentionParams(0.2, rope=RopeSpec(tuple(100.0 ** (-i / 8) for i in range(8)), interleaved=True)),
    ),
}


class Text:
    """One sequence of `num_tokens`, all rows at hand as computed and sealed, so that any part can be asked for."""

    def __init__(self, case: Case, num_tokens: int, seed: int = 0) -> None:
        self.case = case
        random = torch.Generator().manual_seed(seed)
        dtype, P = DTYPES[case.full], case.P
        blocks = -(-num_tokens // P)
        rows = blocks * P
        self.q = torch.randn(num_tokens, case.H, case.D, generator=random).to(dtype)
        self.k = torch.randn(rows, case.G, case.D, generator=random).to(dtype)
        self.v = torch.randn(rows, case.G, case.D, generator=random).to(dtype)
        self.order = torch.randperm(blocks, generator=random).tolist()
        self.opened = self._pages(case.full, blocks)
        self.sealed = self._pages(case.sealed, blocks)
        table = [
            (self.order[i], 0, min(P, num_tokens - i * P), -3 * (i // 3) if case.params.rope else 0)
            for i in range(blocks)
        ]
        self.entries = torch.tensor(table, dtype=torch.int32)
        everything = self.batch(0, num_tokens)
        slots = torch.tensor([self.order[t // P] * P + t % P for t in range(rows)])
        seals = torch.tensor([(self.order[i], i * P) for i in range(blocks)], dtype=torch.int32)
        everything = replace(everything, slot_mapping=slots, open_table=self.opened, seals=seals)
        cpu.store_kv(self.k, self.v, everything, 0)
        cpu.seal(self.k, self.v, everything, 0)

    def _pages(self, form: Form, blocks: int) -> torch.Tensor:
        case = self.case
        layout = PageLayout(case.G, case.D, case.D, case.P, form, form)
        memory = torch.full((blocks * layout.page_bytes + 64,), 0xFF, dtype=torch.uint8)
        self.__dict__.setdefault("memory", []).append(memory)
        start = -(-memory.data_ptr() // 64) * 64
        return torch.tensor([[pack_page(start + i * layout.page_bytes, form, form)] for i in range(blocks)])

    def batch(self, first: int, stop: int, *, open_pages: bool = False) -> KVBatch:
        """The step in which tokens first:stop are new. Without open pages, their rows come from k and v."""
        case = self.case
        return KVBatch(
            group=LayerGroup((0,), case.G, case.D, case.D, case.params.window),
            block_tokens=case.P,
            page_table=self.sealed,
            open_table=self.opened if open_pages else torch.zeros_like(self.opened),
            slot_mapping=torch.zeros(stop - first, dtype=torch.int64),
            query_starts=_int32(0, stop - first),
            context_lens=_int32(first),
            entry_starts=_int32(0, len(self.entries)),
            entries=self.entries,
            seals=torch.zeros(0, 2, dtype=torch.int32),
        )

    def attention(self, first: int, stop: int, *, open_pages: bool = False) -> torch.Tensor:
        batch = self.batch(first, stop, open_pages=open_pages)
        q, k, v = (x[first:stop] for x in (self.q, self.k, self.v))
        out: torch.Tensor = cpu.paged_attention(q, k, v, batch, 0, self.case.params)
        return out


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert torch.isfinite(a).all()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", CASES)
def test_row_is_the_same_in_prefill_chunk_and_decode(target: str, name: str) -> None:
    text = Text(CASES[name], 211)
    prefill = text.attention(0, 211)
    for cuts in ((0, 64, 128, 211), (0, 16, 97, 98, 150, 211)):
        chunks = [text.attention(a, b, open_pages=True) for a, b in pairwise(cuts)]
        assert _same_bits(torch.cat(chunks), prefill), f"chunks {cuts}"
    for t in (0, 1, 15, 16, 63, 64, 130, 210):
        assert _same_bits(text.attention(t, t + 1, open_pages=True), prefill[t : t + 1]), f"decode of token {t}"


@pytest.mark.parametrize("name", CASES)
def test_thread_count_changes_no_bit(target: str, name: str, threads: Callable[[int], None]) -> None:
    text = Text(CASES[name], 1900)
    results = []
    for count in (1, 2, 3):
        threads(count)
        # Alone, so that the kernel splits it over partial groups; and a chunk, which is split over tiles.
        results.append((text.attention(1899, 1900, open_pages=True), text.attention(1792, 1900)))
    for decode, chunk in results[1:]:
        assert _same_bits(decode, results[0][0])
        assert _same_bits(chunk, results[0][1])


def test_other_sequences_of_the_batch_change_no_bit(target: str) -> None:
    case = CASES["int8"]
    texts = [Text(case, n, seed=n) for n in (700, 65, 1, 300)]
    starts = [(699, 700), (0, 65), (0, 1), (190, 300)]
    alone = [text.attention(*at, open_pages=True) for text, at in zip(texts, starts, strict=True)]
    batches = [text.batch(*at, open_pages=True) for text, at in zip(texts, starts, strict=True)]
    offsets = [0, *torch.tensor([len(b.page_table) for b in batches]).cumsum(0).tolist()[:-1]]
    entries = [
        b.entries + torch.tensor([o, 0, 0, 0], dtype=torch.int32) for b, o in zip(batches, offsets, strict=False)
    ]
    together = replace(
        batches[0],
        page_table=torch.cat([b.page_table for b in batches]),
        open_table=torch.cat([b.open_table for b in batches]),
        slot_mapping=torch.cat([b.slot_mapping for b in batches]),
        query_starts=_int32(0, *torch.tensor([b - a for a, b in starts]).cumsum(0).tolist()),
        context_lens=_int32(*(a for a, _ in starts)),
        entry_starts=_int32(0, *torch.tensor([len(e) for e in entries]).cumsum(0).tolist()),
        entries=torch.cat(entries),
    )
    q, k, v = (
        torch.cat([getattr(text, x)[a:b] for text, (a, b) in zip(texts, starts, strict=True)]) for x in ("q", "k", "v")
    )
    assert _same_bits(cpu.paged_attention(q, k, v, together, 0, case.params), torch.cat(alone))


def test_plain_causal_attention(target: str) -> None:
    text = Text(CASES["fp32"], 150)
    k, v = (x[:150].double().repeat_interleave(2, dim=1) for x in (text.k, text.v))  # [J, H, D]
    scores = torch.einsum("thd,jhd->htj", text.q.double(), k) * 0.125
    scores = scores.masked_fill(torch.ones(150, 150).triu(1).bool(), float("-inf"))
    expected = torch.einsum("htj,jhd->thd", scores.softmax(-1), v)
    error = (text.attention(0, 150).double() - expected).norm() / expected.norm()
    assert error < 1e-6


def test_int8_rows_are_read_as_code_times_scale(target: str) -> None:
    """With int8 pages the only new error is that of the query and the weights: 15 bits each."""
    case = CASES["int8"]
    text = Text(case, 129)
    scale = (text.k.abs().amax(-1, keepdim=True) / 127).half().float()
    k = ((text.k / scale).round().clamp(-127, 127) * scale)[:128]
    scale = (text.v.abs().amax(-1, keepdim=True) / 127).half().float()
    v = ((text.v / scale).round().clamp(-127, 127) * scale)[:128]
    k, v = (torch.cat([x, y[128:129]]).double().repeat_interleave(3, dim=1) for x, y in ((k, text.k), (v, text.v)))
    weights = (torch.einsum("thd,jhd->htj", text.q[128:].double(), k) * case.params.scale).softmax(-1)
    expected = torch.einsum("htj,jhd->thd", weights, v)
    error = (text.attention(128, 129, open_pages=True).double() - expected).norm() / expected.norm()
    assert error < 2e-4


def test_a_long_tail_of_small_weights_keeps_its_mass(target: str) -> None:
    """One token outweighs each of 1,984 later ones by e^11.5: codes relative to it would all round to 0."""
    text = Text(replace(CASES["int8"], params=AttentionParams(scale=1.0)), 1985)
    text.q[:] = text.k[:] = text.v[:] = 0
    text.q[1984, :, 0] = text.v[:, :, 1] = 1
    text.k[0, :, 0], text.v[0, :, 1] = 11.5, -1
    seals = torch.tensor([(block, i * 64) for i, block in enumerate(text.order)], dtype=torch.int32)
    cpu.seal(text.k, text.v, replace(text.batch(0, len(text.k)), seals=seals), 0)
    expected = (1984 - math.exp(11.5)) / (1984 + math.exp(11.5))
    assert text.attention(1984, 1985)[0, :, 1].tolist() == pytest.approx([expected] * 9, rel=3e-3)


@pytest.mark.parametrize("name", CASES)
def test_prefetching_changes_no_bit(target: str, name: str) -> None:
    text = Text(CASES[name], 700)
    with_prefetch = text.attention(650, 700, open_pages=True)
    with attention.without_prefetch():
        assert _same_bits(text.attention(650, 700, open_pages=True), with_prefetch)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_seal_to_nan_and_spoil_nothing_else(target: str, bad: float) -> None:
    case = replace(CASES["int8"], P=16)
    text = Text(case, 48)
    clean = text.attention(47, 48, open_pages=True)
    text.k[5, 1, 7] = text.v[20, 2, 0] = bad
    seals = torch.tensor([(block, i * 16) for i, block in enumerate(text.order)], dtype=torch.int32)
    cpu.seal(text.k, text.v, replace(text.batch(0, 48), seals=seals), 0)
    out = text.attention(47, 48, open_pages=True)
    assert out[0, 3:].isnan().all(), "KV heads 1 and 2 hold a row that is not finite"
    assert _same_bits(out[0, :3], clean[0, :3])


def test_queries_that_are_not_finite_give_nan_rows(target: str) -> None:
    text = Text(CASES["int8"], 200)
    text.q[150, 4, 3] = float("inf")
    out = text.attention(128, 200)
    assert out[22, 4].isnan().all()
    out[22, 4] = 0
    assert torch.isfinite(out).all()


def test_targets_are_named_and_forced() -> None:
    targets = cpu.available_targets()
    assert targets[-1] == "portable"
    assert set(targets) <= {"avx512", "avx2", "portable"}
    with pytest.raises(ConfigError, match=r"'avx1024' cannot run on this processor; allowed: .*portable"):
        cpu.select_target("avx1024")


def test_a_batch_that_contradicts_itself_is_refused() -> None:
    text = Text(CASES["int8"], 200)
    good = text.batch(199, 200, open_pages=True)
    q, k, v = text.q[199:], text.k[199:200], text.v[199:200]

    def attend(**changes: Any) -> None:
        cpu.paged_attention(q, k, v, replace(good, **changes), 0, AttentionParams(0.1))

    outside = text.entries.clone()
    outside[1, 0] = 4
    with pytest.raises(ValueError, match=r"entry 1 \(block 4, first row 0, rows 64\) lies in no block"):
        attend(entries=outside)
    too_long = text.entries.clone()
    too_long[0, 1] = 1
    with pytest.raises(ValueError, match="lies in no block"):
        attend(entries=too_long)
    with pytest.raises(ValueError, match="has no page"):
        attend(page_table=torch.zeros_like(text.sealed))
    with pytest.raises(ValueError, match="has no rows as computed"):
        attend(open_table=torch.zeros_like(text.opened))
    with pytest.raises(ValueError, match=r"has 200 rows for 200 \+ 1 tokens"):
        attend(context_lens=_int32(200))
    with pytest.raises(ValueError, match="slot 999 lies in no block"):
        cpu.store_kv(k, v, replace(good, slot_mapping=torch.tensor([999])), 0)
    with pytest.raises(ValueError, match="reads behind the new rows"):
        cpu.seal(k, v, replace(good, seals=torch.tensor([[0, 0]], dtype=torch.int32)), 0)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system has no /proc/self/maps")
def test_one_openmp_runtime_in_the_process() -> None:
    """In a process of its own: other packages may bring a runtime of theirs into this one."""
    done = subprocess.run([sys.executable, "-c", _RUNTIMES], check=True, capture_output=True, text=True)
    runtimes = done.stdout.split()
    assert len(runtimes) == 1, f"OpenMP runtimes in one process: {runtimes}"


_RUNTIMES = """
from pathlib import Path
import torch
from ktransformer2.kernels import cpu
torch.set_num_threads(2)
torch.randn(300, 300) @ torch.randn(300, 300)
cpu.read_bandwidth(2**24, 2, rounds=1)
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if len(line.split()) > 5}
print(*sorted(path for path in mapped if any(name in Path(path).name for name in ("gomp", "libomp", "iomp"))))
"""


def test_matmul_keeps_its_speed_right_after_a_kernel(threads: Callable[[int], None]) -> None:
    """A second pool, or one that sleeps, would slow torch down. Others may use the machine: the best of eight counts.

    The matmul's time after a kernel stands beside its time after a torch sum over as many bytes, turn by turn.
    """
    threads(2)
    text = Text(CASES["int8"], 1024)
    a, b, as_much = torch.randn(256, 512), torch.randn(512, 512), torch.zeros(1024 * 3 * (64 + 64) // 4)

    def matmul_seconds(before: Callable[[], object]) -> float:
        before()
        start = time.perf_counter()
        a @ b
        return time.perf_counter() - start

    shares = []
    for _ in range(8):
        pairs = [
            (matmul_seconds(as_much.sum), matmul_seconds(lambda: text.attention(1023, 1024, open_pages=True)))
            for _ in range(40)
        ]
        after_sum, after_kernel = (statistics.median(side) for side in zip(*pairs, strict=True))
        shares.append(after_sum / after_kernel)
        if shares[-1] >= 0.9:
            return
    pytest.fail(f"after a kernel a matmul ran at {max(shares):.2f} of its speed")


def test_read_bandwidth_is_a_speed() -> None:
    speed = cpu.read_bandwidth(1 << 26, 1, 3)
    assert 1e8 < speed < 1e13, f"{speed:.3g} bytes per second"
