"""Engines over a real directory to which the worst happens: every answer is that of an engine without tiers, each
kind of trouble has its counter, and one line in the log."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ktransformer2.config import TierConfig
from ktransformer2.engine.outputs import RequestOutput
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits
from ktransformer2.tiers.rates import LoadOrRecompute
from tests.cache.tier_driving import figures, lower_of
from tests.engine.tiny_model import Bench, prompt
from tests.tiers.disk_factories import disk_bytes, segment_files

PARAMS = SamplingParams(6, ignore_eos=True)
TEXT = prompt(200, 1)  # 12 full blocks of 16, and 8 tokens
LIMITS = DiskLimits(64 * 2**20, filter_refresh_s=0.0)
MOST_STEPS = 100_000
LONG_S = 30.0


class DiskBench(Bench):
    """An engine that writes what is full, and says when it lies on the disk."""

    def __init__(self, directory: Path, limits: DiskLimits = LIMITS) -> None:
        super().__init__()
        self.tier = DiskTier(directory, limits, self.cache.lineage)
        self.cache.join([self.tier], TierConfig(write_policy="write_through"))

    def written(self) -> None:
        lower = lower_of(self.cache)
        while lower._demotion._wanted:
            self.cache.maintain()
            assert lower._combiner.flush(LONG_S)

    def failures(self) -> set[str]:
        return set(figures(self.cache).failures)


def answered(bench: Bench, ids: list[int]) -> RequestOutput:
    request_id = bench.engine.add(ids, PARAMS)
    for _ in range(MOST_STEPS):
        for chunk in bench.engine.step():
            if chunk.output is not None and chunk.request_id == request_id:
                assert chunk.output.error is None
                bench.check_integrity()
                return chunk.output
    raise AssertionError(f"no answer in {MOST_STEPS} steps")


@pytest.fixture(autouse=True)
def loading_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast this machine computes just now."""
    monkeypatch.setattr(LoadOrRecompute, "computed", lambda *_: None)


@pytest.fixture(scope="module")
def cold() -> tuple[int, ...]:
    """The answer of an engine that keeps nothing."""
    bench = Bench()
    output = answered(bench, TEXT)
    bench.close()
    return tuple(output.token_ids)


def test_a_directory_that_is_deleted_under_a_running_engine(
    tmp_path: Path, cold: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    bench = DiskBench(tmp_path / "kv")
    for number in range(3):
        assert tuple(answered(bench, TEXT).token_ids) == cold
        bench.written()
        bench.cache.clear()
        if number == 1:
            shutil.rmtree(tmp_path / "kv")
    assert bench.failures() == {"disk gone"}
    assert len(caplog.messages) == 1
    assert tuple(answered(bench, TEXT).token_ids) == cold
    bench.close()
    again = DiskBench(tmp_path / "kv")
    assert answered(again, TEXT).usage.restored_tokens == {"disk": 192}, "it was made anew"
    again.close()


def test_two_engines_on_one_directory(tmp_path: Path, cold: tuple[int, ...]) -> None:
    benches = [DiskBench(tmp_path) for _ in range(2)]
    for number in range(6):
        bench = benches[number % 2]
        bench.tier.refresh()
        output = answered(bench, TEXT)
        assert tuple(output.token_ids) == cold
        assert output.usage.restored_tokens == ({"disk": 192} if number else {})
        answered(bench, prompt(100, 10 + number))
        bench.written()
        bench.cache.clear()
    for bench in benches:
        bench.close()
        assert bench.failures() == set()
    assert len(segment_files(tmp_path)) == 2, "each adds to its own"


def test_damaged_files_are_a_miss(tmp_path: Path, cold: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    first = DiskBench(tmp_path)
    answered(first, TEXT)
    first.close()
    (segment,) = segment_files(tmp_path)
    content = bytearray(segment.read_bytes())
    chance = random.Random(4)
    for start in range(0, len(content), 512):
        content[start + chance.randrange(512)] ^= 1 << chance.randrange(8)
    segment.write_bytes(content)
    bench = DiskBench(tmp_path)
    output = answered(bench, TEXT)
    assert (tuple(output.token_ids), output.usage.restored_tokens) == (cold, {})
    assert bench.failures() == {"disk checksum"}
    assert len(caplog.messages) == 1
    bench.close()


def test_a_directory_without_room_keeps_its_limit(tmp_path: Path, cold: tuple[int, ...]) -> None:
    limits = DiskLimits(300_000, segment_bytes=64_000, filter_refresh_s=0.0)
    bench = DiskBench(tmp_path, limits)
    for number in range(8):
        assert tuple(answered(bench, TEXT).token_ids) == cold
        answered(bench, prompt(150, 20 + number))
        bench.written()
        bench.cache.clear()
        assert disk_bytes(tmp_path) <= limits.limit_bytes
    assert bench.tier.stats().evicted_blocks > 0
    assert bench.failures() == set()
    bench.close()
    assert disk_bytes(tmp_path) <= limits.limit_bytes
