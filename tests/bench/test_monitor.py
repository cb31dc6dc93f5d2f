"""The bench of the figures: a small run is whole, and the cache without figures does the same otherwise."""

from __future__ import annotations

from ktransformer2.bench.monitor import _side, run
from ktransformer2.bench.monitor import _Unwatched as Unwatched
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.targets import targets_of
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.models.demo import random_model


def test_a_quick_run_measures_every_key() -> None:
    outcome = run(BenchOptions(quick=True))
    assert set(outcome.summary) == set(targets_of("monitor")) == {"figures_cost_ratio"}
    (row,) = outcome.rows
    assert row["pairs"] == 6
    assert -0.5 < outcome.summary["figures_cost_ratio"] < 0.5


def test_both_sides_do_the_same_but_for_the_figures() -> None:
    model = random_model("float32").model
    with_figures, without = (_side(model, kind, 7) for kind in (KVCache, Unwatched))
    for _ in range(160):
        for side in (with_figures, without):
            side.step()
    a, b = with_figures.cache.stats(), without.cache.stats()
    assert (a.hit_tokens, a.computed_tokens, a.num_blocks) == (b.hit_tokens, b.computed_tokens, b.num_blocks)
    assert with_figures.engine.stats().num_finished == without.engine.stats().num_finished
    assert a.evictions
    assert not b.evictions
    assert with_figures.cache.published.computed_tokens > without.cache.published.computed_tokens == 0
    for side in (with_figures, without):
        side.engine.close()
        side.cache.close()
