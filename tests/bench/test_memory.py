"""The memory scenario: replays against hand-counted figures, thinning, and a quick run as it is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktransformer2.bench import memory
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.replay import STEP_S, TraceReplay
from ktransformer2.bench.run import EXIT_BROKEN_TARGET, main
from ktransformer2.bench.targets import targets_of
from ktransformer2.bench.traces import TraceRequest, thinned
from ktransformer2.config import CacheConfig
from ktransformer2.errors import ConfigError

TOKEN_INT8 = 11_520 + 2 * 30 * 3 * 2  # codes, and an fp16 scale for K and V of every layer and head
TOKEN_BF16 = 23_040


def test_one_request_is_held_as_counted_by_hand() -> None:
    # 100 tokens are read in step 1; steps 2-5 add the four tokens of the answer. Samples after steps 1 and 5.
    figures = TraceReplay([TraceRequest(0.0, 100, 4)], 8192, CacheConfig()).run()
    assert figures.num_steps == 5
    assert figures.computed_tokens == 104
    assert figures.held.tokens == pytest.approx((100 + 104) * 4 * STEP_S)
    assert figures.held.block_tokens == pytest.approx(2 * 128 * 4 * STEP_S)
    assert figures.waste_tokens == pytest.approx(1 - 204 / 256)
    filled = 2 * 64 * TOKEN_INT8 + (36 + 40) * TOKEN_BF16
    assert figures.held.filled == pytest.approx(filled * 4 * STEP_S)
    assert figures.held.static == pytest.approx(2 * 8192 * TOKEN_BF16 * 4 * STEP_S)
    assert 0 < figures.waste_bytes < 1
    assert figures.held.seconds == pytest.approx(2 * 4 * STEP_S)
    assert figures.moved_per_token == 0
    assert figures.calls_per_1k_tokens >= figures.growth_per_1k_tokens > 0
    assert figures.tokens_copied_by_growth == 0


def test_what_does_not_fit_waits_or_is_preempted_and_still_ends() -> None:
    requests = [TraceRequest(0.0, 600, 80) for _ in range(4)]
    figures = TraceReplay(requests, 8192, CacheConfig(memory_bytes=24 * 10**6)).run()
    assert figures.num_preemptions > 0
    assert figures.computed_tokens >= 4 * 680
    assert figures.peak_bytes <= 24 * 10**6
    assert figures.tokens_copied_by_growth == 0


def test_thinning_keeps_the_lengths_and_the_load() -> None:
    requests = [TraceRequest(float(i), 10 + i, 5) for i in range(100)]
    kept = thinned(requests, 10)
    assert [request.prompt_tokens for request in kept] == list(range(10, 110, 10))
    assert [request.arrival_s for request in kept] == [float(i) for i in range(10)]
    assert thinned(requests, 200) == requests


@pytest.mark.slow
def test_a_quick_run_measures_every_key_that_needs_no_model(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    code = main("memory", quick=True, json_path=path, check=True, options=BenchOptions(seed=1))
    result = json.loads(path.read_text())
    needs_model = {"throughput_vs_static_same_bytes", "step_p99_over_p50_vs_control"}
    assert set(result["summary"]) == set(targets_of("memory")) - needs_model
    assert result["full"] is False
    assert result["configuration"]["cache_config"]["min_chunk_tokens"] == 256
    assert result["configuration"]["options"]["seed"] == 1
    missed = [
        key
        for key, target in targets_of("memory").items()
        if key in result["summary"] and not target.holds(result["summary"][key])
    ]
    assert code == (EXIT_BROKEN_TARGET if missed else 0)
    assert missed == []


def test_a_part_alone_says_what_it_says_among_all() -> None:
    outcome = memory.run(BenchOptions(quick=True, parts=("million",)))
    assert set(outcome.summary) == {"saved_vs_static_1m"}
    assert [row["part"] for row in outcome.rows] == ["one sequence"]


def test_a_part_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"bench memory has no part 'trace'; it has: traces, million"):
        main("memory", options=BenchOptions(parts=("trace",)))
    with pytest.raises(ConfigError, match=r"bench monitor has no part 'x'; it has: one only"):
        main("monitor", options=BenchOptions(parts=("x",)))
