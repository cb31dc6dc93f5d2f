"""Which token is chosen: penalties, cuts, draws and log probabilities, against the plain formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformer2.engine.sampler import (
    SampledToken,
    SamplingState,
    _draw,
    _nucleus,
    best_tokens,
    candidates,
    sample,
)
from ktransformer2.engine.sampling import SamplingParams


def state(prompt_ids: list[int] | None = None, index: int = 0, **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(**params), prompt_ids or [], index)


def sampled(logits: torch.Tensor, states: list[SamplingState]) -> list[SampledToken]:
    """A row each, as a step of the engine has them."""
    tokens = []
    for row, (best, each) in enumerate(zip(best_tokens(logits), states, strict=True)):
        assert best is not None
        tokens.append(sample(logits, row, best, each))
    return tokens


def probabilities(values: list[float]) -> torch.Tensor:
    """Logits whose softmax is `values`."""
    return torch.tensor(values).log()


def kept(logits: torch.Tensor, **params: Any) -> list[int]:
    return sorted(candidates(logits, SamplingParams(**params))[1].tolist())


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert sampled(logits, [state(), state(), state()]) == [SampledToken(1), SampledToken(0), SampledToken(2)]
    assert best_tokens(torch.tensor([[0.0, 2.0, 2.0], [-math.inf, 0.0, -0.0]])) == [1, 1]  # of equals the first
    assert best_tokens(logits[:0]) == []


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [-50.0, 50.0, -50.0], [0.0, 0.0, 1.0]])
    assert [t.token_id for t in sampled(logits, [state(), state(temperature=1.0), state()])] == [1, 1, 2]


def test_presence_penalty_is_taken_once_and_frequency_penalty_each_time() -> None:
    logits = torch.zeros(4)
    penalised = state([0], presence_penalty=0.5, frequency_penalty=0.25)
    for token in (1, 1, 2):
        penalised.observe(token)
    assert penalised.penalties is not None
    # The prompt's token 0 is free: both count the answer only.
    assert penalised.penalties.apply(logits).tolist() == [0.0, -1.0, -0.75, 0.0]
    penalised.observe(1)
    assert penalised.penalties.apply(logits).tolist() == [0.0, -1.25, -0.75, 0.0]
    assert logits.tolist() == [0.0] * 4


def test_repetition_penalty_counts_prompt_and_answer_and_pushes_both_signs_down() -> None:
    penalised = state([0], repetition_penalty=2.0)
    penalised.observe(1)
    assert penalised.penalties is not None
    assert penalised.penalties.apply(torch.tensor([4.0, -4.0, 4.0])).tolist() == [2.0, -8.0, 4.0]


def test_penalties_come_before_the_greedy_choice() -> None:
    logits = torch.tensor([[2.0, 1.5]])
    assert sampled(logits, [state([0], repetition_penalty=2.0)]) == [SampledToken(1)]


def test_a_bias_is_added_after_the_penalties_for_greedy_and_random_answers() -> None:
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    biased = state([0], repetition_penalty=2.0, logit_bias={2: 1.75})
    assert biased.adjusted(logits[0]).tolist() == [1.0, 1.5, 1.75]
    assert sampled(logits, [biased]) == [SampledToken(2)]
    assert sampled(logits, [state(temperature=1.0, logit_bias={1: 100})]) == [SampledToken(1)]
    assert logits.tolist() == [[2.0, 1.5, 0.0]]


class OneAfterTheOther:
    """Allows token 0, then 1, then 2, ..."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self, vocab_size: int) -> torch.Tensor:
        return torch.arange(vocab_size) == len(self.seen)

    def observe(self, token_id: int) -> None:
        self.seen.append(token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_has_the_last_word_and_hears_of_every_token(temperature: float) -> None:
    constrained = state(temperature=temperature, constraint=OneAfterTheOther, logit_bias={3: 100}, logprobs=0)
    chosen = []
    for _ in range(3):
        (token,) = sampled(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), [constrained])
        constrained.observe(token.token_id)
        chosen.append(token.token_id)
        assert token.logprob is not None
        assert math.isfinite(token.logprob.logprob)  # of the model's own distribution
    assert chosen == [0, 1, 2]


def test_temperature_divides_logits() -> None:
    values, ids = candidates(torch.tensor([1.0, 3.0]), SamplingParams(temperature=0.5))
    assert (values.tolist(), ids.tolist()) == ([-4.0, 0.0], [0, 1])


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([[80.0, 80.5, -3e38]])
    assert sampled(logits, [state(temperature=1e-40)]) == [SampledToken(1)]


def test_top_k_keeps_the_k_largest() -> None:
    logits = torch.tensor([0.0, 4.0, 2.0, 3.0])
    assert kept(logits, temperature=1.0, top_k=2) == [1, 3]
    assert kept(logits, temperature=1.0, top_k=9) == [0, 1, 2, 3]
    assert kept(logits, temperature=1.0) == [0, 1, 2, 3]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = probabilities([0.1, 0.5, 0.15, 0.25])
    assert kept(logits, temperature=1.0, top_p=0.4) == [1]
    assert kept(logits, temperature=1.0, top_p=0.7) == [1, 3]
    assert kept(logits, temperature=1.0, top_p=0.85) == [1, 2, 3]
    assert kept(logits, temperature=1.0, top_p=1e-9) == [1]


def test_min_p_is_relative_to_the_best() -> None:
    logits = probabilities([0.5, 0.3, 0.15, 0.05])
    assert kept(logits, temperature=1.0, min_p=0.31) == [0, 1]
    assert kept(logits, temperature=1.0, min_p=0.29) == [0, 1, 2]
    assert kept(logits, temperature=1.0, min_p=1.0) == [0]


def test_top_p_is_taken_of_what_min_p_and_top_k_left() -> None:
    logits = probabilities([0.4, 0.3, 0.2, 0.1])
    # Of three, the shares are 0.44, 0.33, 0.22: two reach 0.75. Of all four, three would be needed.
    assert kept(logits, temperature=1.0, top_p=0.75) == [0, 1, 2]
    assert kept(logits, temperature=1.0, top_k=3, top_p=0.75) == [0, 1]
    assert kept(logits, temperature=1.0, min_p=0.5, top_p=0.75) == [0, 1]


@pytest.mark.parametrize(("spread", "least"), [(4.0, 0), (1.5, 1024), (0.01, 8192)])
def test_the_quick_looks_at_the_nucleus_find_what_sorting_finds(spread: float, least: int) -> None:
    values = spread * torch.randn(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    best, places = _nucleus(values, 0.6)
    ordered, order = values.sort(descending=True)
    num_kept = int((ordered.softmax(dim=0).cumsum(dim=0) < 0.6).sum()) + 1
    assert num_kept > least
    assert places.tolist() == order[:num_kept].tolist()
    assert best.tolist() == ordered[:num_kept].tolist()


@pytest.mark.parametrize(
    ("uniform", "place"),
    [(0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (1 - 2**-53, 3)],
)
def test_a_draw_falls_where_the_shares_say_and_never_on_a_token_without_one(uniform: float, place: int) -> None:
    values = torch.tensor([0.25, 0.0, 0.5, 0.25], dtype=torch.float64).log()
    assert _draw(values, uniform) == place


def test_frequencies_follow_the_distribution() -> None:
    logits = probabilities([0.6, 0.3, 0.1]).unsqueeze(0)
    sampler = state(temperature=1.0, seed=1)
    counts = [0, 0, 0]
    for _ in range(2000):
        counts[sampled(logits, [sampler])[0].token_id] += 1
    for count, share in zip(counts, (0.6, 0.3, 0.1), strict=True):
        assert abs(count / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000)


@settings(max_examples=30, deadline=None)
@given(others=st.lists(st.sampled_from([0.0, 0.7, 1.3]), max_size=5), place=st.integers(0, 5))
def test_a_seed_decides_alone_whatever_shares_the_batch(others: list[float], place: int) -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2))
    alone = state(temperature=1.0, top_p=0.9, seed=7)
    expected = [sampled(logits[i : i + 1], [alone])[0].token_id for i in range(8)]
    batched = state(temperature=1.0, top_p=0.9, seed=7)
    states = [state(temperature=t) for t in others]
    place = min(place, len(states))
    states.insert(place, batched)
    got = [sampled(logits[i].repeat(len(states), 1), states)[place].token_id for i in range(8)]
    assert got == expected


def test_the_answers_of_one_request_draw_differently_and_reproducibly() -> None:
    def draws(seed: int, index: int) -> list[float]:
        own = state(temperature=1.0, seed=seed, index=index)
        return [own.uniform() for _ in range(4)]

    assert draws(3, 1) == draws(3, 1)
    assert len({tuple(draws(seed, index)) for seed in (3, 4) for index in (0, 1, 2)}) == 6
    unseeded = [state(temperature=1.0).uniform() for _ in range(3)]
    assert len(set(unseeded)) == 3


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = probabilities([0.25, 0.5, 0.125, 0.125]).unsqueeze(0)
    (token,) = sampled(logits, [state([1], logprobs=2, repetition_penalty=100.0)])
    assert token.token_id == 0  # the penalty took the best one away, but not out of what is reported
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert [t for t, _ in token.logprob.top] == [1, 0]
    assert [p for _, p in token.logprob.top] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


def test_logprobs_zero_gives_the_chosen_token_only() -> None:
    (token,) = sampled(torch.zeros(1, 4), [state(logprobs=0)])
    assert token.logprob is not None
    assert token.logprob.top == ()
    assert token.logprob.logprob == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("vocab", [3, 1000, 49_152])
def test_rows_that_cannot_be_sampled_from_are_named(vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0))
    logits[1, -1], logits[2, 1] = math.nan, math.inf
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, vocab // 2] = math.nan
    logits[5, 0], logits[5, 1] = math.inf, -math.inf
    assert best_tokens(logits) == [int(logits[0].argmax()), None, None, None, None, None]


@pytest.mark.parametrize("masked", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 1, "top_p": 0.999, "min_p": 0.001},
        {"temperature": 1.0, "seed": 1, "top_k": 900},
        {"temperature": 2.0, "seed": 1, "repetition_penalty": 1.3, "frequency_penalty": 1.0, "logprobs": 3},
    ],
)
def test_a_model_may_forbid_most_of_its_vocabulary(masked: float, params: dict[str, Any]) -> None:
    logits = torch.full((1, 1000), masked)
    allowed = [7, 500, 999]
    logits[0, allowed] = torch.tensor([1.0, 3.0, 2.0])
    assert best_tokens(logits) == [500]
    sampler = state([7, 8], **params)
    for _ in range(50):
        (token,) = sampled(logits, [sampler])
        assert token.token_id in allowed
        sampler.observe(token.token_id)
        if token.logprob is not None:
            assert [token_id for token_id, _ in token.logprob.top] == [500, 999, 7]
            assert all(math.isfinite(logprob) for _, logprob in token.logprob.top)


def test_a_penalty_that_makes_an_infinity_leaves_one_token() -> None:
    params = SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1e-38, seed=1)
    assert sampled(torch.tensor([[3.0, 2.0, 1.0]]), [SamplingState(params, [1])]) == [SampledToken(1)]
