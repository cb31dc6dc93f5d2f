"""The bench of a step's overhead: small runs are whole, and its parts do what they are timed for."""

from __future__ import annotations

import pytest

from ktransformer2.bench import overhead
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.targets import targets_of
from ktransformer2.models.demo import random_model


def test_a_quick_run_measures_the_engine() -> None:
    outcome = overhead.run(BenchOptions(quick=True, parts=("engine",)))
    assert [row["batch"] for row in outcome.rows] == [1, 32]
    assert set(outcome.summary) == {"engine_overhead_ms_b1", "engine_overhead_ms_b32"} < set(targets_of("overhead"))
    assert 0 < outcome.summary["engine_overhead_ms_b1"] < outcome.summary["engine_overhead_ms_b32"] < 100


def test_both_runners_are_timed_on_the_same_weights(tiny_model_folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CONTEXTS", {"512": 512})
    outcome = overhead.run(BenchOptions(quick=True, parts=("runner",), model=str(tiny_model_folder), dtype="fp32"))
    assert [row["runner"] for row in outcome.rows] == ["lean", "transformers"] * 2
    assert set(outcome.summary) == {f"lean_vs_transformers_{work}_512" for work in ("decode", "prefill")}
    assert set(outcome.summary) < set(targets_of("overhead"))
    # On a model this small a decode is nearly all overhead, and that is what the lean runner is for.
    assert outcome.summary["lean_vs_transformers_decode_512"] > 1


def test_a_chunk_is_computed_behind_the_text_and_taken_back() -> None:
    behind = overhead.Behind(random_model("float32").model, 100)
    behind.read()
    behind.decode()
    behind.read()
    assert behind._table.num_tokens == 108
    behind.close()
