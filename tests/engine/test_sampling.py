"""What a request may ask of the sampler, and what is said to the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import RequestError


def test_defaults_are_greedy_without_penalties() -> None:
    params = SamplingParams()
    assert (params.is_greedy, params.has_penalties, params.max_new_tokens) == (True, False, None)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[7]).stop_token_ids == (7,)


def test_the_reserve_is_named_once() -> None:
    assert SamplingParams().with_reserve(256).max_new_tokens == 256
    assert SamplingParams(max_new_tokens=3).with_reserve(256).max_new_tokens == 3


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ({"max_new_tokens": 0}, "a whole number, 1 or more"),
        ({"max_new_tokens": True}, "a whole number, 1 or more"),
        ({"temperature": -0.1}, "0 or more"),
        ({"temperature": math.nan}, "0 or more"),
        ({"temperature": math.inf}, "0 or more"),
        ({"temperature": "hot"}, "0 or more"),
        ({"top_k": -1}, "a whole number, 0 or more"),
        ({"top_k": 1.5}, "a whole number, 0 or more"),
        ({"top_p": 0.0}, "above 0 to 1"),
        ({"top_p": 1.01}, "above 0 to 1"),
        ({"min_p": 1.5}, "0 to 1"),
        ({"presence_penalty": 2.5}, "-2 to 2"),
        ({"frequency_penalty": -3.0}, "-2 to 2"),
        ({"repetition_penalty": 0.0}, "above 0"),
        ({"stop_token_ids": list(range(1025))}, "1024"),
        ({"seed": -1}, f"a whole number, 0 to {2**63 - 1}"),
        ({"stop": ("",)}, "up to 64 strings, none of them empty"),
        ({"stop": ["x"] * 65}, "up to 64 strings, none of them empty"),
        ({"stop": 5}, "a list"),
        ({"stop_token_ids": [-1]}, "token ids, 0 or more"),
        ({"logprobs": 101}, "a whole number, 0 to 100"),
        ({"n": 0}, "a whole number, 1 to 128"),
        ({"n": 129}, "a whole number, 1 to 128"),
    ],
)
def test_a_value_out_of_range_says_what_is_allowed(setting: dict[str, Any], allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**setting)
    (name,) = setting
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert message.endswith(f"is not allowed; allowed: {allowed}")


@pytest.mark.parametrize("bias", [{-1: 1.0}, {True: 1.0}, {1: 101}, {1: "much"}, {1: math.nan}])
def test_a_bias_out_of_range_says_what_is_allowed(bias: dict[int, float]) -> None:
    with pytest.raises(RequestError, match=r"logit_bias\[.*allowed: a token id, 0 or more, to -100 to 100"):
        SamplingParams(logit_bias=bias)
    with pytest.raises(RequestError, match="names 1025 tokens; allowed: 1024"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))


def test_only_the_plainest_answer_takes_the_largest_logit_as_it_is() -> None:
    assert SamplingParams().is_plain
    asks: list[dict[str, Any]] = [{"temperature": 1.0}, {"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}]
    assert not any(SamplingParams(**ask).is_plain for ask in asks)
    params = SamplingParams(logit_bias={3: 1}).with_reserve(4)
    assert params.logit_bias == {3: 1}
