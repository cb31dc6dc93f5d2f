"""What another salt has read does not show: the same calls are made for it as for what nobody has read.

Calls instead of times: they do not depend on the machine. `bench prefix --part salt` has the times.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest

from ktransformer2.config import TierConfig
from ktransformer2.engine.outputs import Usage
from ktransformer2.engine.sampling import SamplingParams
from tests.engine.tiny_model import Bench, prompt
from tests.tiers.memory_tier import MemoryTier

TEXT, OTHER = prompt(100, 1), prompt(100, 2)
Calls = Counter[tuple[str, str]]


def calls_of(act: Callable[[], None]) -> Calls:
    """Every call of a function of this package in this thread, by file and name."""
    calls: Calls = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and "ktransformer2" in code.co_filename:
            calls[code.co_filename, code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls


def asked(bench: Bench, ids: list[int], salt: bytes) -> Usage:
    bench.engine.add(ids, SamplingParams(1, ignore_eos=True), salt=salt)
    while True:
        for chunk in bench.engine.step():
            if chunk.output is not None:
                assert chunk.output.error is None
                return chunk.output.usage


def bench_that_knows(ids: list[int], has_tiers: bool) -> Bench:
    """A bench where the salt `one` has read a text, twice, so that it lies below the device too."""
    bench = Bench()
    if has_tiers:
        bench.cache.join([MemoryTier("disk")], TierConfig())
    for _ in range(2):
        asked(bench, ids, b"one")
    if has_tiers:
        bench.cache.maintain()
        assert bench.cache._lower is not None
        assert bench.cache._lower._combiner.flush(10.0)
        bench.cache.maintain()
    return bench


@pytest.mark.parametrize("has_tiers", [False, True])
def test_another_salts_text_costs_the_calls_of_a_miss_and_ones_own_others(has_tiers: bool) -> None:
    knows, knows_not = bench_that_knows(TEXT, has_tiers), bench_that_knows(OTHER, has_tiers)
    usages: list[Usage] = []
    foreign = calls_of(lambda: usages.append(asked(knows, TEXT, b"two")))
    missed = calls_of(lambda: usages.append(asked(knows_not, TEXT, b"two")))
    own = calls_of(lambda: usages.append(asked(knows, TEXT, b"one")))
    assert [usage.cached_tokens // 16 for usage in usages] == [0, 0, 6]
    assert foreign == missed
    assert sum(missed.values()) > 100
    assert own != missed
    for bench, ids in ((knows, TEXT), (knows_not, OTHER)):
        stats = bench.cache.tier_stats()
        assert (stats is not None) == has_tiers
        if stats is not None:
            assert stats.written_blocks == len(ids) // 16, "it lay below when the other salt asked"
            assert stats.loaded_blocks == 0, "and nothing was read for a miss"
        bench.close()
