"""The scenarios that need a model, end to end on a small random one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from ktransformer2.bench import decode, fidelity, footprint, step_times, throughput
from ktransformer2.bench.greedy_modes import Answer, GreedyModes
from ktransformer2.bench.outcome import BenchOptions, Outcome
from ktransformer2.bench.run import main
from ktransformer2.bench.targets import targets_of
from ktransformer2.bench.traces import TraceRequest
from ktransformer2.errors import ConfigError
from ktransformer2.models.demo import random_model
from ktransformer2.models.loading import LoadedModel


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_model("fp32")


@pytest.fixture(scope="module")
def saved(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    loaded.model.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def test_steps_grow_and_move_only_where_they_should(loaded: LoadedModel) -> None:
    living, control = step_times.compare(loaded.model, 150)
    assert len(living.seconds) == len(control.seconds) == 150
    assert living.growth_events > 0
    assert living.moved_bytes > 0
    assert (control.growth_events, control.moved_bytes) == (0, 0)
    assert living.p99_over_p50 >= 1


def test_both_ways_answer_all_requests_and_paging_runs_more_at_once(loaded: LoadedModel) -> None:
    requests = [TraceRequest(0.0, 20 + 7 * i, 12) for i in range(9)]
    paged, static = throughput.compare(loaded.model, requests, seed=1)
    assert paged.num_requests == static.num_requests == 9
    assert static.num_steps > 2 * paged.num_steps
    assert paged.peak_bytes <= throughput.budget_bytes(loaded.model)


def test_requests_are_drawn_by_seed_and_fit_a_static_cache() -> None:
    trace = [TraceRequest(float(i), 100 * i, 10) for i in range(1, 200)]
    drawn = throughput.drawn(trace, 20, seed=5)
    assert drawn == throughput.drawn(trace, 20, seed=5)
    assert max(request.total_tokens for request in drawn) <= 8192


def _parts(outcome: Outcome) -> list[object]:
    return list(dict.fromkeys(row["part"] for row in outcome.rows))


def test_decode_measures_all_its_keys(saved: str) -> None:
    outcome = decode.run(BenchOptions(quick=True, dtype="fp32", model=saved, max_tokens=200))
    assert set(outcome.summary) == set(targets_of("decode"))
    by_part = {part: [row["contender"] for row in outcome.rows if row["part"] == part] for part in _parts(outcome)}
    assert list(by_part.values()) == [["ours", "stock", "static"], ["ours", "static", "masked", "stock"]]
    alone = decode.run(BenchOptions(quick=True, dtype="fp32", model=saved, max_tokens=200, parts=("first",)))
    assert set(alone.summary) == {"ttft_vs_hf_8k"}
    # 233 tokens: 3 sealed blocks, a filling block as computed, and tables, over 233 tokens of 1,024 bytes in fp16
    assert 0.5 < outcome.summary["kv_bytes_vs_fp16"] < 1.5


@pytest.mark.slow
def test_fidelity_finds_no_mismatch_in_fp32(saved: str) -> None:
    outcome = fidelity.run(BenchOptions(quick=True, dtype="fp32", model=saved, num_prompts=4, max_tokens=150))
    assert set(outcome.summary) == {"mismatch_fp32", "kl_int8", "top1_int8", "ppl_ratio_int8"}
    assert outcome.summary["mismatch_fp32"] == 0
    answers = [row for row in outcome.rows if "answers" in row]
    assert sum(int(str(row["answers"])) for row in answers) >= 4 * 4


def test_fidelity_goes_on_where_it_stopped(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = str(tmp_path / "fidelity")
    options = BenchOptions(dtype="fp32", model=saved, num_prompts=3, max_tokens=40, parts=("greedy",), resume=resume)
    one = GreedyModes.alone_and_warm
    read: list[int] = []

    def interrupted(modes: GreedyModes, prompt: Sequence[int]) -> list[Answer]:
        read.append(len(prompt))
        if len(read) == 2:
            raise KeyboardInterrupt
        return one(modes, prompt)

    monkeypatch.setattr(GreedyModes, "alone_and_warm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fidelity.run(options)
    found = fidelity.run(options)
    assert len(read) == 4, "the first prompt was read again"
    again = fidelity.run(options)
    assert len(read) == 4, "a finished run reads nothing"
    assert again.rows == found.rows == fidelity.run(dataclasses.replace(options, resume=None)).rows
    with pytest.raises(ConfigError, match="bench plan cannot go on where it stopped"):
        main("plan", options=BenchOptions(resume=resume))


def test_fidelity_judges_bf16_by_the_fp32_margin(saved: str) -> None:
    outcome = fidelity.run(BenchOptions(quick=True, dtype="bf16", model=saved, num_prompts=2, max_tokens=20))
    assert set(outcome.summary) == {
        "mismatch_bf16",
        "near_tie_share_bf16",
    }  # random weights: all is a near-tie or worse
    differences = [row for row in outcome.rows if "verdict" in row]
    assert outcome.summary["mismatch_bf16"] == sum(row["verdict"] == "mismatch" for row in differences)


@pytest.mark.parametrize(
    ("dtype", "margin", "spread", "expected"),
    [
        ("fp32", 1e-3, 0.0, "tie"),
        ("fp32", 1.1e-3, 9.0, "mismatch"),
        ("bf16", 0.1, 0.125, "near-tie"),
        ("bf16", 0.125, 0.125, "mismatch"),
    ],
)
def test_verdicts(dtype: str, margin: float, spread: float, expected: str) -> None:
    assert fidelity.verdict(dtype, margin, spread) == expected


def test_a_peak_with_a_model_goes_away(saved: str) -> None:
    found = footprint.measure("600", saved, "fp32")
    assert found.peak_committed > 0
    assert found.resident_after <= 3_047_424


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="dtype='fp16'"):
        BenchOptions(dtype="fp16")
    with pytest.raises(ConfigError, match="num_prompts=0"):
        BenchOptions(num_prompts=0)
    assert BenchOptions(dtype="fp32").is_full
    assert not BenchOptions(num_prompts=5).is_full
    assert not BenchOptions(quick=True).is_full
