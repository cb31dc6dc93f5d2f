"""The bench of the server: a quick run against a real one, and what is made of turns."""

from __future__ import annotations

import pytest

from ktransformer2.bench.chat_load import Endpoint, Turn
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.run import result_of
from ktransformer2.bench.serve import drawn, judged, run
from ktransformer2.bench.targets import targets_of
from ktransformer2.errors import ConfigError, NoServerError
from ktransformer2.models.demo import random_model
from tests.server.serving import opened, served


def test_a_quick_run_measures_every_key() -> None:
    loaded = random_model("float32")
    with served(lambda: opened(loaded)) as server:
        outcome = run(BenchOptions(quick=True, url=server.url))
        with pytest.raises(NoServerError, match="no models are listed"):
            Endpoint(f"{server.url}/elsewhere").model()
    assert set(outcome.summary) == set(targets_of("serve"))
    assert outcome.summary["serve_errors"] == 0
    # The model's bytes are mostly no text, so of an answer little is found again; of what was asked, all.
    assert outcome.summary["cached_share"] > 0.8
    assert [row["chats"] for row in outcome.rows] == [4, 4, 4]


def test_what_a_seed_draws_is_drawn_again() -> None:
    first, again = drawn(BenchOptions()), drawn(BenchOptions())
    assert first == again
    assert (len(first.chats), {len(chat) for chat in first.chats}) == (32, {6})
    assert list(first.starts_s) == sorted(first.starts_s)
    assert drawn(BenchOptions(seed=1)) != first


def test_turns_are_judged_against_what_could_be_found() -> None:
    turns = [
        Turn(0, 0, ttft_s=1.0, gaps_s=(0.1, 0.1), prompt_tokens=100, cached_tokens=5, new_tokens=29),
        Turn(0, 1, ttft_s=0.1, gaps_s=(0.1,), prompt_tokens=200, cached_tokens=96, new_tokens=30),
        Turn(1, 0, ttft_s=3.0, gaps_s=(0.1,), prompt_tokens=50, new_tokens=3),
        Turn(1, 1, error="429: busy"),
    ]
    outcome = judged(turns, 16, 4)
    assert outcome.summary["serve_errors"] == 1
    assert outcome.summary["cached_share"] == 96 / 128  # 128 tokens were computed: eight whole blocks
    assert outcome.summary["ttft_later_turns_vs_cold"] == pytest.approx(0.1 / 2.0)
    assert outcome.summary["good_share"] == 2 / 4  # one came late, one not at all


def test_another_bench_asks_no_server() -> None:
    with pytest.raises(ConfigError, match="bench monitor asks no server"):
        result_of("monitor", BenchOptions(quick=True, url="http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="is no address"):
        Endpoint("nowhere")
