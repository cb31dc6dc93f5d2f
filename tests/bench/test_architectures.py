"""Every architecture answers as `generate` does or is refused, the page says which, and a fault would be seen."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformer2.bench import architectures
from ktransformer2.bench.architectures import NEAR_TIE, answers_differ, doors_differ, examine, load_small, run, sweep
from ktransformer2.bench.models_page import DOORS, LIST, MAKE_PAGE, Verdict, as_list, models_page
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.errors import UnsupportedModelError
from ktransformer2.integrations.forward_step import ForwardStep
from ktransformer2.layout import ModelGeometry
from ktransformer2.models.llama import LlamaModel


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return sweep()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_architecture_is_accounted_for(verdicts: list[Verdict]) -> None:
    assert [v for v in verdicts if v.outcome in ("different", "not built")] == []
    assert len({v.class_name for v in verdicts if v.outcome == "served"}) >= 60
    assert all(v.reason for v in verdicts if v.outcome == "refused")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_windows_bound_what_their_layers_hold(verdicts: list[Verdict]) -> None:
    with_window = [v for v in verdicts if any(group.window for group in v.groups)]
    assert len(with_window) > 30
    for verdict in with_window:
        held = {group.window: blocks for group, blocks in zip(verdict.groups, verdict.held_blocks, strict=True)}
        assert held in ({16: 2, None: 12}, {16: 2}), verdict


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_says_what_is_so(verdicts: list[Verdict], repository: Path) -> None:
    page = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == models_page(verdicts), f"docs/models.md is out of date; make it anew: {MAKE_PAGE}"
    assert LIST.read_text(encoding="utf-8") == as_list(verdicts), f"{LIST} is out of date; make it anew: {MAKE_PAGE}"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "latent attention"),
        ("dots3_note_text", "latent attention"),  # in some layers with other sizes than in others
        ("mamba", r"recurrent state \(linear_attention\)"),
        ("bart", "encoder-decoder"),
        ("bloom", "does not take its attention from the transformers registry"),
        ("llama4_text", "layers of kind chunked_attention"),
        ("gemma3n_text", "shares keys and values"),
        ("gemma4_text", "head size 512"),
        ("moshi", "the window 16, the masks it asks for say none"),
        ("diffllama", "attends twice"),
    ],
)
def test_reasons(model_type: str, reason: str) -> None:
    verdict = examine(model_type, "AnyClass")
    assert verdict.outcome == "refused"
    assert re.search(reason, verdict.reason), verdict.reason


def narrower(geometry: ModelGeometry, by: int) -> ModelGeometry:
    """The geometry with every window changed."""
    groups = (dataclasses.replace(g, window=g.window - by if g.window else None) for g in geometry.groups)
    return dataclasses.replace(geometry, groups=tuple(groups))


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("model_type", ["gemma2", "mixtral", "mimo_v2_flash"])
def test_a_window_off_by_one_would_be_seen(model_type: str, by: int) -> None:
    served = load_small(model_type, seed=0)
    served.geometry = narrower(served.geometry, by)
    _held, difference = answers_differ(served, seed=0)
    assert difference not in ("", NEAR_TIE)


def test_blocks_that_a_window_never_lets_go_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformer2.cache.table_edits import TableEdits

    monkeypatch.setattr(TableEdits, "release_passed", lambda *_: None)
    _held, difference = answers_differ(load_small("gemma2", seed=0), seed=0)
    assert difference == "a group with a window of 16 tokens holds 12 blocks of 16"


def test_an_error_while_answering_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no answer")

    monkeypatch.setattr(LlamaModel, "forward", fail)
    verdict = examine("llama", "LlamaForCausalLM")
    assert (verdict.outcome, verdict.reason) == ("different", "answering: ZeroDivisionError: no answer")


def test_an_untyped_error_while_loading_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no model")

    monkeypatch.setattr(architectures, "refuse_unservable", fail)
    verdict = examine("llama", "LlamaForCausalLM")
    assert (verdict.outcome, verdict.reason) == ("different", "loading: ZeroDivisionError: no model")


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3", "mimo_v2_flash", "gpt2"])
def test_every_door_serves_what_the_engine_serves(model_type: str) -> None:
    assert doors_differ(load_small(model_type, seed=0), seed=0) == ((), "")


def test_a_door_that_answers_otherwise_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = ForwardStep.attend

    def louder(self: ForwardStep, *args: Any) -> torch.Tensor:
        return attend(self, *args) * 1.5

    monkeypatch.setattr(ForwardStep, "attend", louder)
    _shut, difference = doors_differ(load_small("llama", seed=0), seed=0)
    assert difference.startswith("drop-in: ")
    assert examine("llama", "LlamaForCausalLM").outcome == "different"


def test_a_door_that_is_shut_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedModelError("no pages today")

    monkeypatch.setattr(architectures, "attach", refuse)
    verdict = examine("llama", "LlamaForCausalLM")
    assert verdict.outcome == "served"
    assert dict(verdict.shut_doors) == {"attach": "no pages today", "attach, warm": "no pages today"}
    assert verdict.row["doors"] == 2
    page = models_page([verdict])
    assert (
        "in place 1, over a gathered copy 1, an attached model 0, the same on what the first call left behind 0" in page
    )
    assert "| llama | attach | no pages today |" in page
    assert verdict.listed["reason"] == "not by every door: attach: no pages today; attach, warm: no pages today"
    assert set(dict(verdict.shut_doors)) < set(DOORS)


def test_near_ties_are_drawn_anew_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([NEAR_TIE, NEAR_TIE, ""])
    monkeypatch.setattr(architectures, "answers_differ", lambda *_: ((1,), next(outcomes)))
    verdict = examine("llama", "LlamaForCausalLM")
    assert (verdict.outcome, verdict.near_ties) == ("served", 2)
    monkeypatch.setattr(architectures, "answers_differ", lambda *_: ((1,), NEAR_TIE))
    assert examine("llama", "LlamaForCausalLM").outcome == "different"


def test_a_class_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Verdict("llama", "LlamaForCausalLM", "served", runner="lean"),
        Verdict("exaone", "LlamaForCausalLM", "served"),
        Verdict("opt", "OPTForCausalLM", "different", "token 3"),
        Verdict("mpt", "MptForCausalLM", "refused", "no registry"),
    ]
    monkeypatch.setattr(architectures, "sweep", lambda *_: found)
    outcome = run(BenchOptions())
    assert outcome.summary == {"served_architectures": 1.0, "silently_different": 1.0}
    assert run(BenchOptions(quick=True)).summary == {"silently_different": 1.0}
    assert [row["outcome"] for row in outcome.rows] == ["served", "served", "different", "refused"]
    page = models_page(found)
    assert "**Served**: 2 model types, 1 classes" in page
    assert "| mpt | MptForCausalLM | no registry |" in page
    assert "| llama | LlamaForCausalLM |  | lean |" in page
    assert "own forward pass, for llama; all others" in page
