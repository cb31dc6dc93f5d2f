"""Every way to answer a prompt, beside `model.generate`, on a small random model; and how differences are judged."""

from __future__ import annotations

import random

import pytest

from ktransformer2.bench.corpus import DrawnPrompt
from ktransformer2.bench.fidelity import batches, draw_modes, first_difference
from ktransformer2.bench.greedy_modes import DRAWN_MODES, Answer, GreedyModes
from ktransformer2.bench.int8_quality import measure, windows_of
from ktransformer2.bench.reference import Reference
from ktransformer2.models.demo import random_model
from ktransformer2.models.loading import LoadedModel

NUM_NEW = 16
LENGTHS = (1, 40, 63, 64, 97, 300)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_model("fp32")


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(256) for _ in range(length)]


def check(loaded: LoadedModel, prompt: list[int], answers: list[Answer]) -> None:
    with loaded.model.original_attention() as model:
        run = Reference(model).greedy(prompt, NUM_NEW)
    for answer in answers:
        place = first_difference(answer.token_ids, run.token_ids)
        assert place is None or run.margins[place] < 1e-3, (answer, run)


@pytest.mark.parametrize("length", LENGTHS)
def test_alone_and_warm(loaded: LoadedModel, length: int) -> None:
    answers = GreedyModes(loaded.model, NUM_NEW).alone_and_warm(prompt_of(length))
    assert [answer.mode for answer in answers] == ["alone", "warm"]
    assert answers[1].evidence == length - 1  # at model precision a match is token-exact, all but the last token
    check(loaded, prompt_of(length), answers)


@pytest.mark.parametrize("mode", [mode for mode in DRAWN_MODES if mode != "batch"])
@pytest.mark.parametrize("length", LENGTHS)
def test_drawn_modes(loaded: LoadedModel, mode: str, length: int) -> None:
    answers = GreedyModes(loaded.model, NUM_NEW).drawn(mode, prompt_of(length), random.Random(length))
    assert len(answers) == (2 if mode == "fork" else 1)
    if length > 2 * NUM_NEW:
        assert all(answer.evidence > 0 for answer in answers), answers
    check(loaded, prompt_of(length), answers)


def test_ragged_batch(loaded: LoadedModel) -> None:
    prompts = [prompt_of(length) for length in (*LENGTHS, 5, 128)]
    for prompt, answer in zip(prompts, GreedyModes(loaded.model, NUM_NEW).batch(prompts), strict=True):
        check(loaded, prompt, [answer])


def test_int8_changes_little_and_chunks_change_nothing(loaded: LoadedModel) -> None:
    window = prompt_of(400)
    fine, coarse = (measure(loaded.model, [window], chunk) for chunk in (64, 512))
    assert fine.count == coarse.count == 399
    assert 0 < fine.mean_kl < 0.01
    assert coarse.mean_kl == pytest.approx(fine.mean_kl, rel=0.05)
    assert fine.top1_share > 0.9
    assert fine.ppl_ratio == pytest.approx(1.0, abs=0.02)


def test_windows_are_spread_over_the_text() -> None:
    tokens = list(range(10_000))
    assert [(w[0], len(w)) for w in windows_of(tokens, 2)] == [(0, 2049), (7951, 2049)]
    assert len(windows_of(tokens, 100)) == 4
    assert [w[0] for w in windows_of(tokens, 1)] == [0]


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 5, 3), (1, 2, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (), None)],
)
def test_first_difference(ours: tuple[int, ...], theirs: tuple[int, ...], place: int | None) -> None:
    assert first_difference(ours, theirs) == place


def test_modes_are_drawn_without_repetition() -> None:
    drawn = [draw_modes(random.Random(seed)) for seed in range(200)]
    assert all(len(set(modes)) == 2 for modes in drawn)
    assert {mode for modes in drawn for mode in modes} == set(DRAWN_MODES)


def test_the_last_batch_is_filled_up() -> None:
    everyone = [DrawnPrompt(i, "code", (i,)) for i in range(20)]
    groups = batches(everyone[10:], everyone)
    assert [len(group) for group in groups] == [8, 8]
    assert [prompt.index for prompt in groups[1]] == [18, 19, 0, 1, 2, 3, 4, 5]
    assert batches([], everyone) == []
