"""Prompts drawn by seed from the texts in the repository."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ktransformer2.bench.corpus import Drawing, data_folder, draw_prompts, log_uniform, text_of
from ktransformer2.errors import ConfigError


def encode(text: str) -> list[int]:
    return list(text.encode()[:20_000])


def test_the_same_seed_draws_the_same_prompts() -> None:
    first = draw_prompts(Drawing(30, 1000, 7), encode)
    assert first == draw_prompts(Drawing(30, 1000, 7), encode)
    assert first != draw_prompts(Drawing(30, 1000, 8), encode)
    assert {prompt.kind for prompt in first} == {"english", "chinese", "code"}
    assert all(1 <= len(prompt.token_ids) <= 1000 for prompt in first)


def test_a_longer_drawing_begins_with_the_shorter() -> None:
    assert draw_prompts(Drawing(30, 1000, 7), encode)[:10] == draw_prompts(Drawing(10, 1000, 7), encode)


def test_lengths_are_log_uniform() -> None:
    rng = random.Random(1)
    lengths = [log_uniform(rng, 4000) for _ in range(4000)]
    assert (min(lengths), max(lengths) > 3900) == (1, True)
    # ln(63)/ln(4000) = 0.4995: half of the prompts are shorter than 63 tokens
    assert 0.47 < sum(length < 63 for length in lengths) / 4000 < 0.53


def test_texts_are_bounded_and_there() -> None:
    for kind in ("english", "chinese", "code", "wikitext"):
        assert 10_000 < len(text_of(kind)) <= 150_010


def test_a_folder_without_data_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_BENCH_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="KTRANSFORMER_BENCH_DATA"):
        data_folder()
