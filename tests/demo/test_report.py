"""What the demo says it found: cold and warm, or what an earlier run had kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.demo.memory_curve import MemoryCurve
from ktransformer2.demo.report import as_json, sentences
from ktransformer2.demo.restart import Answer, LastQuestion
from ktransformer2.demo.scenario import DemoResult
from ktransformer2.engine.outputs import Completion, RequestOutput, Usage
from ktransformer2.errors import KTransformerError
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
    assert lines[0].startswith("Earlier run: restored 896, reused 960 of the first question's tokens")
    assert not any("cold" in line for line in lines)
    assert as_json(later)["answers"][0]["restored_tokens"] == {"disk": 896}


def test_a_new_process_says_what_it_restored() -> None:
    usage = Usage(1020, 960, 4, 0.7, restored_tokens={"disk": 960})
    restarted = replace(result(cached_tokens=0, ttft_s=5.0), restarted=Answer("Either may.", usage))
    words = "Restart: a new process restored 960, reused 960 of the last question's 1,020 tokens; first token 0.70 s."
    assert words in sentences(restarted)
    assert as_json(restarted)["after_restart"]["restored_tokens"] == {"disk": 960}
    assert as_json(result(cached_tokens=0, ttft_s=5.0))["after_restart"] is None


@pytest.mark.slow
def test_the_last_question_is_asked_in_a_new_process(tmp_path: Path) -> None:
    prompt = [number % 90 for number in range(200)]
    options = {"memory": "64MB", "persist": str(tmp_path / "kv")}
    last = LastQuestion(prompt, 4, options, "float32", ["random"])
    first, second = last.answer(), last.ask()
    assert first.usage.restored_tokens == {}
    assert second.usage.restored_tokens == {"disk": 192}
    assert second.usage.cached_tokens == 192
    assert second.text == first.text


def test_a_new_process_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(KTransformerError, match="the new process ended with 1; what it said stands above"):
        LastQuestion([1], 4, {}, "float32", ["random"]).ask()
