"""The attention steps: what is timed, what it is divided by, and that a small run fills every key and row."""

from __future__ import annotations

import pytest

from ktransformer2.bench import attention
from ktransformer2.bench.attention_steps import (
    CHUNKS,
    LAYERS,
    Decode,
    Prefill,
    StepSeconds,
    decode_figures,
    prefill_figures,
)
from ktransformer2.bench.targets import targets_of
from ktransformer2.config import EngineConfig


def test_a_prefill_counts_the_pairs_that_see_each_other() -> None:
    prefill = Prefill(130, "int8", 64, seed=1)
    assert prefill.operations == sum(range(1, 131)) * 9 * (64 + 64) * 2
    prefill()
    prefill()
    assert len(prefill.seconds) == 2
    assert all(min(taken.store, taken.seal, taken.attention) > 0 for taken in prefill.seconds)
    assert StepSeconds(1, 2, 3) + StepSeconds(10, 20, 30) == StepSeconds(11, 22, 33)
    assert StepSeconds(1, 2, 3).total == 6


@pytest.mark.parametrize(("kv", "row_bytes"), [("int8", 64 + 2), ("full", 2 * 64)])
def test_a_decode_reads_keys_and_values_of_its_whole_context(kv: str, row_bytes: int) -> None:
    decode = Decode(192, kv, seed=1)
    assert decode.bytes == 192 * LAYERS * 3 * 2 * row_bytes
    decode()
    decode.close()


def test_a_small_run_has_a_row_for_every_contender_and_only_known_keys() -> None:
    decodes, prefills = decode_figures(600, 2, seed=1), prefill_figures(600, 2, seed=1)
    assert [row["contender"] for row in decodes.rows] == [
        "int8 behind 512",
        "full behind 512",
        "int8 behind 600",
        "full behind 600",
    ]
    assert [row["contender"] for row in prefills.rows] == [*(f"int8, chunks of {n:,}" for n in CHUNKS), "full"]
    assert EngineConfig().max_step_tokens in CHUNKS, "the row of the shipped chunk is compared with full pages"
    assert decodes.summary.keys() | prefills.summary.keys() < targets_of("attention").keys()
    assert all(value > 0 for value in (decodes.summary | prefills.summary).values())
    assert attention.PARTS == ("query", "steps")
