"""The bench of the drop-in, end to end on a small random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktransformer2.bench import contest, dropin
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.targets import targets_of
from ktransformer2.models.demo import random_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    made = random_model("fp32")
    made.model.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return str(folder)


def options(saved: str, *parts: str) -> BenchOptions:
    return BenchOptions(quick=True, dtype="fp32", model=saved, max_tokens=300, parts=parts)


def test_decoding_and_the_second_call_are_measured(saved: str) -> None:
    outcome = dropin.run(options(saved, "decode", "attach"))
    answers = {"dropin_mismatch_fp32", "dropin_mismatch_bf16", "dropin_near_tie_share_bf16"}
    assert set(outcome.summary) == set(targets_of("dropin")) - answers
    contenders = [row["contender"] for row in outcome.rows if "contender" in row]
    assert contenders == ["dropin", "static", "masked", "stock"]
    assert [row["call"] for row in outcome.rows if "call" in row] == ["cold", "warm"]
    assert outcome.rows[0]["times_ours"] == 1
    # 332 tokens: 5 sealed blocks in int8, a filling block as computed, and tables, over 1,024 bytes a token in fp16
    assert 0.5 < outcome.summary["dropin_kv_bytes_vs_fp16"] < 1.2
    assert outcome.configuration["prompt_tokens"] == 300


def test_answers_are_compared_through_every_door(saved: str) -> None:
    outcome = dropin.run(BenchOptions(quick=True, model=saved, max_tokens=60, num_prompts=4, parts=("answers",)))
    assert set(outcome.summary) == {"dropin_mismatch_fp32", "dropin_mismatch_bf16", "dropin_near_tie_share_bf16"}
    assert outcome.summary["dropin_mismatch_fp32"] == 0
    bf16: list[Any] = outcome.rows[18:]
    ties, answers = (sum(row[name] for row in bf16) for name in ("near_ties", "answers"))
    assert outcome.summary["dropin_near_tie_share_bf16"] == ties / answers
    assert len(outcome.rows) == 2 * 6 * 3  # dtypes, ways, doors
    assert {row["answers"] for row in outcome.rows} == {1, 4}


def test_a_wrong_answer_is_a_mismatch(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    through = dropin._through_the_doors

    def spoiled(*args: Any) -> dict[tuple[str, str], dropin.Answers]:
        found = through(*args)
        found["4 beams", "drop-in"][0][0][3] += 1
        return found

    monkeypatch.setattr(dropin, "_through_the_doors", spoiled)
    alone = BenchOptions(quick=True, dtype="fp32", model=saved, max_tokens=40, num_prompts=2, parts=("answers",))
    assert dropin.run(alone).summary == {"dropin_mismatch_fp32": 1}


def test_the_faster_way_is_the_one_of_the_smaller_median() -> None:
    seconds = {"static": [1.0, 9.0, 1.0], "masked": [2.0, 2.0, 2.0]}
    assert contest.faster_of(("static", "masked"), seconds) == "static"


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    class Contender:
        def __init__(self, name: str) -> None:
            self.name = name

        def decode(self, num_tokens: int) -> list[float]:
            calls.append(self.name)
            return [float(len(calls))] * num_tokens

    seconds = contest.decode_rounds({"a": Contender("a"), "b": Contender("b")}, 2)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert seconds == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
