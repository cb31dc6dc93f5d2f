"""The bench of the tiers: small runs are whole, and what they compare is what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformer2.bench import tier_steps
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.targets import targets_of
from ktransformer2.bench.tiers import Chains, churned_filter, run
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.engine.engine import Engine
from ktransformer2.models.demo import random_model
from ktransformer2.tiers.tier import ROOT


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path))
    return tmp_path


def options(*parts: str) -> BenchOptions:
    return BenchOptions(quick=True, parts=parts, dtype="fp32")


def test_blocks_travel_whole_and_in_large_transfers(cache: Path) -> None:
    outcome = run(options("disk"))
    assert set(outcome.summary) == {"median_transfer_bytes", "disk_read_share"}
    # 11 blocks of 761,856 bytes are one slice of 8 MiB; 32 blocks are two of those and one of ten
    assert outcome.summary["median_transfer_bytes"] >= 512 * 1024
    assert {row["reader"] for row in outcome.rows} == {"tier", "plain"}
    assert {row["part"] for row in outcome.rows} == {"reading 24 MB, pages dropped"}
    assert list(cache.iterdir()) == []


def test_the_filter_keeps_its_promise_through_a_churn() -> None:
    bits, passed, rebuilds = churned_filter(2_000, 50_000)
    assert bits == 12
    assert passed <= 0.01
    assert rebuilds > 10


def test_a_directory_that_was_exchanged_ends_lookups_at_its_filter() -> None:
    outcome = run(options("filter"))
    assert set(outcome.summary) == {"bloom_fpr", "bloom_probes_saved"}
    assert outcome.summary["bloom_probes_saved"] >= 0.95
    row = outcome.rows[1]
    held, evicted = int(str(row["held_blocks"])), int(str(row["evicted_blocks"]))
    assert (held + evicted, row["lookups"]) == (_blocks_of_a_quick_churn(), 2_000)


def _blocks_of_a_quick_churn() -> int:
    return 1000 // 32 * 32


def test_the_rest_measures_its_keys() -> None:
    outcome = run(options("writer", "prefetch"))
    assert set(outcome.summary) == set(targets_of("tiers")) - {
        *("median_transfer_bytes", "disk_read_share", "bloom_fpr", "bloom_probes_saved")
    }
    policies = [row["policy"] for row in outcome.rows if "policy" in row]
    assert policies == ["write_through_selective", "write_through"]
    on, off = (row for row in outcome.rows if "fetching_ahead" in row)
    assert (on["fetching_ahead"], off["fetching_ahead"]) == ("on", "off")
    assert int(str(on["loaded"])) > 0
    assert int(str(off["late"])) == 0
    assert float(str(off["batch_waited_s"])) > 0


def test_without_fetching_ahead_a_prompt_finds_the_same(cache: Path) -> None:
    """Only the time at which blocks come up differs."""
    subject = tier_steps.Subject(random_model("fp32").model, "random", "fp32")
    load = tier_steps.Load(8, 128, 4, 1, 8, 2)
    texts = tier_steps._Texts(load, subject.model.vocab_size, 3)
    folder = cache / "kv"
    kept = tier_steps._joined(subject.model, folder, KVCache, None)
    engine = Engine(subject.model, kept)
    tier_steps._run(engine, texts.texts, 1)
    tier_steps._closed(engine, kept)
    requests = [texts.asked(number) for number in (0, 1)]
    for kind in (KVCache, tier_steps._OnItsTurn):
        stats = tier_steps._queue(subject.model, folder, kind, requests, load).stats
        assert stats.restored_tokens == {"disk": 2 * 128}
        assert (stats.loaded_blocks, stats.used_blocks) == (4, 4)


def test_chains_are_chains() -> None:
    chains = Chains(2, 3, 100)
    blocks = list(chains.blocks())
    assert [block.parent for block in blocks] == [
        ROOT,
        blocks[0].key,
        blocks[1].key,
        ROOT,
        blocks[3].key,
        blocks[4].key,
    ]
    assert chains.keys(1) == [block.key for block in blocks[3:]]
    assert blocks[4].payload == chains.payload(blocks[4].key)
    assert len({block.key for block in blocks}) == 6
