"""The bench of the linear layers: a quick run measures every key, and a model's layers are its own again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformer2.bench import linear
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.targets import targets_of
from ktransformer2.models.loading import load_model


def test_a_quick_run_measures_speed_and_quality(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_OUTPUT", (640, 64))
    monkeypatch.setattr(linear, "_LAYER", ((96, 64), (64, 128)))
    monkeypatch.setattr(linear, "_READ_BYTES", 2**20)
    monkeypatch.setattr(linear, "THREADS", 1)
    outcome = linear.run(BenchOptions(quick=True, model=str(tiny_model_folder)))
    assert set(outcome.summary) == set(targets_of("linear"))
    assert all(0.5 < value < 2 for key, value in outcome.summary.items() if key.startswith("ppl_ratio"))
    assert abs(outcome.summary["ppl_ratio_int4"] - 1) > abs(outcome.summary["ppl_ratio_int8"] - 1) > 0
    speed = [row for row in outcome.rows if "contender" in row]
    assert len(speed) == 3 * 7
    numbers = 30 * (96 * 64 + 64 * 128) + 640 * 64
    megabytes = {row["contender"]: row["mb"] for row in speed[:7]}
    assert [megabytes[name] for name in ("torch_fp32", "bf16", "int8", "int4")] == [
        numbers * size / 1e6 for size in (4, 2, 1.0625, 0.625)
    ]


def test_a_model_multiplies_by_other_weights_only_meanwhile(tiny_model_folder: Path) -> None:
    model = load_model(tiny_model_folder, dtype="float32").model
    window = list(range(40))
    layers = linear._layers_of(model.model, tiny_model_folder, "int4")
    with model.original_attention() as bare:
        before = linear._logits(bare, window)
        with linear._instead(layers):
            assert not torch.equal(linear._logits(bare, window), before)
        assert torch.equal(linear._logits(bare, window), before)
