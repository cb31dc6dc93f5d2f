"""What the demo says it found: cold and warm, or what an earlier run had kept."""

from __future__ import annotations

from typing import Any

from ktransformer2.demo.memory_curve import MemoryCurve
from ktransformer2.demo.report import as_json, sentences
from ktransformer2.demo.scenario import DemoResult
from ktransformer2.engine.outputs import Completion, RequestOutput, Usage
from tests.cache.factories import make_cache


def result(**first: Any) -> DemoResult:
    usages = (Usage(1000, new_tokens=4, **first), Usage(1010, 960, 4, 0.5))
    answer = Completion(0, "Yes.", (1, 2, 3, 4), None, "length")
    curve = MemoryCurve(make_cache().stats, 10**6)
    curve.sample(0, "start")
    return DemoResult(10, tuple(RequestOutput("", (answer,), usage) for usage in usages), curve, 0)


def test_a_first_run_is_cold_then_warm() -> None:
    lines = sentences(result(cached_tokens=0, ttft_s=5.0))
    assert lines[0] == "Reuse: 960 of the second question's 1,010 tokens were in the cache."
    assert "cold" in lines[1]
    assert "(10 times sooner)" in lines[1]


def test_a_later_run_says_what_was_restored_and_calls_nothing_cold() -> None:
    later = result(cached_tokens=960, ttft_s=0.6, restored_tokens={"disk": 896})
    lines = sentences(later)
    assert lines[0].startswith("Restart: restored 896, reused 960 of the first question's tokens")
    assert not any("cold" in line for line in lines)
    assert as_json(later)["answers"][0]["restored_tokens"] == {"disk": 896}
