"""Every trouble is proven on a real cache: a bad knob brings the finding, the knob turned takes it away."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.engine.outputs import EngineStats
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.engine.snapshot import Snapshot
from ktransformer2.engine.troubles import TROUBLES, Finding, diagnose
from ktransformer2.errors import ConfigError
from tests.cache.factories import Clock, make_cache
from tests.cache.tier_driving import cache_over, lower_of, no_threads
from tests.cache.tier_driving import read as read_tiers
from tests.engine.tiny_model import Bench, prompts
from tests.tiers.memory_tier import MemoryTier

_DOCUMENT = 640  # tokens: 40 blocks of 16


def found(cache: KVCache) -> list[Finding]:
    """What is diagnosed. Side effect: the cache is closed."""
    stats = cache.stats()
    cache.close()
    return diagnose(stats, EngineStats())


def the_only(findings: list[Finding], trouble: str, knob: str) -> Finding:
    assert [(finding.trouble, finding.knob) for finding in findings] == [(trouble, knob)]
    return findings[0]


def read(cache: KVCache, tokens: list[int], publish: bool = True) -> None:
    """One request: what is found is adopted, the rest computed, all released; unpublished, it looks for nothing."""
    table, match = cache.new_table(publish=publish), cache.match(tokens) if publish else None
    num_found = match.num_tokens if match else 0
    assert cache.allocate(table, len(tokens) - num_found, match)
    cache.publish(table, tokens[num_found:])
    cache.release(table)
    cache.maintain(1)


def document(number: int, length: int = _DOCUMENT) -> list[int]:
    return [1000 * number + i for i in range(length)]


# --- growth


def coming_and_going(**config: Any) -> list[Finding]:
    """One long text stays, short ones come and go."""
    cache = make_cache(**config)
    stays = cache.new_table(publish=False)
    assert cache.allocate(stays, 1600)
    cache.publish(stays, document(0, 1600))
    for number in range(60):
        read(cache, document(number, 100), publish=False)
    return found(cache)


def test_thrash_by_eager_shrinking_and_growing() -> None:
    finding = the_only(
        coming_and_going(shrink_threshold_ratio=1.0, low_free_ratio=1.0), "thrash", "shrink_threshold_ratio"
    )
    assert finding.counter == "growth_per_1k_tokens"
    assert finding.value > finding.limit == 5
    assert coming_and_going(shrink_threshold_ratio=0.2, low_free_ratio=1.0) == []
    assert coming_and_going(shrink_threshold_ratio=1.0, low_free_ratio=0.2) == []


def test_thrash_by_chunks_that_are_too_small() -> None:
    finding = the_only(coming_and_going(min_chunk_tokens=64), "thrash", "shrink_threshold_ratio")
    assert "raise min_chunk_tokens" in finding.advice
    assert coming_and_going(min_chunk_tokens=256) == []


def one_long_text(**config: Any) -> list[Finding]:
    cache = make_cache(**config)
    table = cache.new_table()
    for start in range(0, 4096, 16):
        assert cache.allocate(table, 16)
        cache.publish(table, range(start, start + 16))
        cache.maintain()
    return found(cache)


def test_small_steps() -> None:
    finding = the_only(one_long_text(min_chunk_tokens=16), "small steps", "min_chunk_tokens")
    assert finding.value > 5
    assert one_long_text(min_chunk_tokens=256) == []


# --- fragmentation


def every_other_text_goes(**config: Any) -> list[Finding]:
    cache = make_cache(**config)
    tables = [cache.new_table(publish=False) for _ in range(200)]
    for number, table in enumerate(tables):
        assert cache.allocate(table, 64)
        cache.publish(table, document(number, 64))
    for table in tables[::2]:
        cache.release(table)
    for _ in range(20):
        cache.maintain(1)
    return found(cache)


def test_fragmentation_that_nothing_repairs() -> None:
    finding = the_only(every_other_text_goes(max_fragmentation_ratio=1.0), "fragmentation", "max_fragmentation_ratio")
    assert finding.value > finding.limit == 0.3
    assert every_other_text_goes(max_fragmentation_ratio=0.3) == []
    assert every_other_text_goes(max_fragmentation_ratio=1.0, defrag_interval_requests=10) == []


def test_fragmentation_that_is_repaired_too_slowly() -> None:
    one_extent = 16 * 2 * 2 * 24 * 4  # tokens, layers, heads, channels of K and V, bytes: half of what it takes
    slow = every_other_text_goes(maintain_bytes=2 * one_extent)
    assert "raise maintain_bytes" in the_only(slow, "fragmentation", "maintain_bytes").advice
    assert every_other_text_goes(maintain_bytes=8 * 2**20) == []


# --- reuse


def documents_in_turn(clock: Clock | None = None, pause_s: float = 0.0, **config: Any) -> list[Finding]:
    """Eight documents, each read three times, one after the other."""
    clock = clock or Clock()
    cache = make_cache(clock=clock, **config)
    for _ in range(3):
        for number in range(8):
            read(cache, document(number))
            clock.now += pause_s
            cache.maintain()
    return found(cache)


def cache_bytes(num_documents: int) -> int:
    cache = make_cache()
    size = cache.bytes_for(num_documents * _DOCUMENT)
    cache.close()
    return size


def test_churn_for_want_of_memory() -> None:
    finding = the_only(
        documents_in_turn(memory_bytes=cache_bytes(4), cached_share_ratio=1.0), "eviction churn", "memory"
    )
    assert finding.value >= finding.limit > 0
    assert documents_in_turn(memory_bytes=cache_bytes(12), cached_share_ratio=1.0) == []


def test_churn_for_want_of_a_share() -> None:
    bad = documents_in_turn(memory_bytes=cache_bytes(12), cached_share_ratio=0.3)
    the_only(bad, "eviction churn", "cached_share_ratio")
    assert documents_in_turn(memory_bytes=cache_bytes(12), cached_share_ratio=1.0) == []


def test_forgotten_while_idle() -> None:
    the_only(documents_in_turn(pause_s=30, cached_idle_s=60), "forgotten while idle", "cached_idle_s")
    assert documents_in_turn(pause_s=30, cached_idle_s=300) == []


def one_beginning(**config: Any) -> list[Finding]:
    """200 prompts that share their first 100 tokens, in a form whose matches are whole blocks."""
    cache = make_cache(kv="int8", **config)
    for number in range(1, 201):
        read(cache, document(0, 100) + document(number, 20))
    return found(cache)


def test_low_hit_rate_where_blocks_are_longer_than_what_is_shared() -> None:
    finding = the_only(one_beginning(block_tokens=128), "low hit rate", "block_tokens")
    assert (finding.counter, finding.value) == ("hit_ratio", 0.0)
    assert one_beginning(block_tokens=16) == []


# --- scheduling


def eight_long_answers(**config: Any) -> list[Finding]:
    bench = Bench(num_blocks=32, **config)
    for ids in prompts([64] * 8):
        bench.engine.add(ids, SamplingParams(max_new_tokens=64, ignore_eos=True))
    while bench.engine.has_work:
        bench.engine.step()
    findings = diagnose(bench.cache.stats(), bench.engine.stats())
    bench.close()
    return findings


def test_preemptions() -> None:
    finding = the_only(eight_long_answers(max_num_sequences=8), "preemptions", "max_num_sequences")
    assert finding.value > finding.limit
    assert eight_long_answers(max_num_sequences=3) == []


# --- tiers


def fetched_ahead(num_documents: int, *, in_time: bool = True) -> list[Finding]:
    """Two documents that a tier has are fetched while another text takes its room, in memory for so many."""
    tier = MemoryTier()
    with no_threads():
        first = cache_over(tier)
        for number in range(2):
            read(first, document(number))
        first.close()
        cache = cache_over(tier, memory_bytes=cache_bytes(num_documents), cached_share_ratio=1.0)
        for number in range(2):
            fetch = cache.fetch(document(number))
            assert fetch is not None
            if in_time:
                read_tiers(cache)
            else:
                lower_of(cache)._prefetcher.read_one()  # it is under way when its prompt gives up
            read(cache, document(8 + number), publish=False)
            cache.end_fetch(fetch)
            read_tiers(cache)
            read(cache, document(number))
        return [finding for finding in found(cache) if finding.trouble == "poor prefetch"]


def test_prefetch_into_too_little_memory() -> None:
    finding = the_only(fetched_ahead(1), "poor prefetch", "memory")
    assert finding.value < finding.limit == 0.75
    assert fetched_ahead(4) == []


def test_prefetch_that_comes_too_late() -> None:
    assert "faster disk" in the_only(fetched_ahead(4, in_time=False), "poor prefetch", "disk_directory").advice
    assert fetched_ahead(4, in_time=True) == []


# --- the list itself


def test_too_little_to_judge_by_is_no_finding() -> None:
    cache = make_cache(min_chunk_tokens=16, max_fragmentation_ratio=1.0)
    read(cache, document(0, 100))
    assert found(cache) == []


def test_a_snapshot_is_read_back_as_it_was_written() -> None:
    cache = make_cache(memory_bytes=cache_bytes(4))
    for number in range(8):
        read(cache, document(number))
    snapshot = Snapshot(cache.stats(), EngineStats(num_added=8))
    cache.close()
    assert snapshot.cache.evictions
    assert Snapshot.from_json(snapshot.as_json()) == snapshot
    assert Snapshot.from_json({"text": "", "stats": snapshot.as_json()}) == snapshot


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda parts: parts.pop("cache"), "no snapshot"),
        (lambda parts: parts["cache"].pop("used_bytes"), "used_bytes"),
        (lambda parts: parts["engine"].update(num_dragons=1), "num_dragons"),
        (lambda parts: parts["engine"].update(num_steps="many"), "engine holds something that is no number"),
        (lambda parts: parts["cache"]["evictions"].update(room=None), "cache holds something that is no number"),
    ],
)
def test_what_is_no_snapshot_is_refused(spoil: Callable[[dict[str, Any]], object], why: str) -> None:
    cache = make_cache()
    parts = Snapshot(cache.stats(), EngineStats()).as_json()
    cache.close()
    spoil(parts)
    with pytest.raises(ConfigError, match=why):
        Snapshot.from_json(parts)


def test_the_manual_has_the_same_troubles_in_the_same_order_with_their_proofs(repository: Path) -> None:
    manual = (repository / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = manual.partition("## A running cache")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    names = list(dict.fromkeys(row[0] for row in rows[1:]))
    assert names == list(TROUBLES)
    for row in rows[1:]:
        proofs = re.findall(r"test_\w+", row[-1])
        assert proofs, row
        assert set(proofs) <= set(globals()), row
