"""The policy simulator: the optimum against brute force, the same policies inside KVCache, scans, pins, traces."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformer2.bench import policy
from ktransformer2.bench.corpus import block_trace_path
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.policy_hints import HintOracle
from ktransformer2.bench.policy_sim import MakePolicy, Replay, ceiling, optimum, replay, scan_requests, scan_survival
from ktransformer2.bench.policy_trace import BlockRequest, BlockTrace, Interleaving, read_agentic, read_block_trace
from ktransformer2.bench.run import main
from ktransformer2.bench.targets import targets_of
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.replacement import POLICIES, make_policy
from ktransformer2.cache.replacement.bands import Bands
from ktransformer2.cache.replacement.policy import Clock
from ktransformer2.config import CacheConfig
from ktransformer2.errors import ConfigError
from ktransformer2.layout import Form, LayerGroup, ModelGeometry, RopeSpec
from tests.cache.replacement.machine import PATHS

REQUESTS = st.lists(PATHS, min_size=1, max_size=7).map(
    lambda paths: [BlockRequest(float(i), path) for i, path in enumerate(paths)]
)


def maker(name: str) -> MakePolicy:
    return lambda clock: make_policy(name, clock)


def best_by_search(requests: Sequence[BlockRequest], capacity: int, counted_from: int) -> int:
    """Every prefix-closed choice of what to keep after every request, tried out."""
    parents: dict[int, int | None] = {}
    for request in requests:
        parents |= {i: request.ids[n - 1] if n else None for n, i in enumerate(request.ids)}
    best = {frozenset[int](): 0}  # what is cached -> most hits so far
    for r, request in enumerate(requests):
        ids = frozenset(request.ids[:capacity])
        following: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            hits += len(ids & held) if r >= counted_from else 0
            others = sorted(held - ids)
            for size in range(min(len(others), capacity - len(ids)) + 1):
                for kept in itertools.combinations(others, size):
                    after = ids | frozenset(kept)
                    if all(parents[i] is None or parents[i] in after for i in after):
                        following[after] = max(following.get(after, -1), hits)
        best = following
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, capacity=st.integers(1, 6), data=st.data())
def test_the_optimum_is_what_a_search_finds(requests: list[BlockRequest], capacity: int, data: st.DataObject) -> None:
    assert optimum(requests, capacity) == best_by_search(requests, capacity, 0)
    counted_from = data.draw(st.integers(0, len(requests) - 1))
    assert optimum(requests, capacity, counted_from) >= best_by_search(requests, capacity, counted_from)


def test_of_a_part_the_optimum_is_a_bound() -> None:
    """100 can be kept beside the third request only with 10 before it, for which there is no room."""
    requests = [
        BlockRequest(float(i), path) for i, path in enumerate([[10, 100], [11, 110, 1100, 11000], [10], [10, 100]])
    ]
    assert best_by_search(requests, 5, 3) == 1
    assert optimum(requests, 5, 3) == 2


@settings(max_examples=40, deadline=None)
@given(requests=st.lists(PATHS, min_size=20, max_size=60), capacity=st.integers(1, 15), name=st.sampled_from(POLICIES))
def test_no_policy_passes_the_optimum(requests: list[list[int]], capacity: int, name: str) -> None:
    trace = [BlockRequest(float(i), path) for i, path in enumerate(requests)]
    hits = replay(trace, maker(name), capacity).hits
    for half in (0, len(trace) // 2):
        assert sum(hits[half:]) <= optimum(trace, capacity, half) <= ceiling(trace, half)


def test_published_figures_of_the_chat_trace() -> None:
    """LRU and the optimum on all of Mooncake's conversation trace, in percent of block touches."""
    requests = read_block_trace(block_trace_path(policy.CHAT)).requests
    touches = sum(len(request.ids) for request in requests)
    assert (len(requests), touches) == (12_031, 288_500)
    assert round(100 * ceiling(requests) / touches, 2) == 36.64
    assert round(100 * sum(replay(requests, maker("lru"), 18_279).hits) / touches, 1) == 27.9
    assert round(100 * optimum(requests, 18_279) / touches, 1) == 36.6


# --- the same policies inside KVCache

_TOKENS = 16
_GROUP = LayerGroup(tuple(range(8)), num_kv_heads=8, k_head_size=64, v_head_size=64)  # extents that dwarf the tables


def tokens_of(request: BlockRequest) -> list[int]:
    """The ids as text: each block's tokens say its id, so that equal chains of ids are equal prefixes."""
    return [number for i in request.ids for number in (i >> 20, i & 0xFFFFF, *[7] * (_TOKENS - 2))]


def hits_inside(cache: KVCache, request: BlockRequest) -> int:
    """One request through the cache itself. One token more, since a match never covers the last one."""
    tokens = tokens_of(request)
    table, match = cache.new_table(), cache.match([*tokens, 1])
    assert cache.allocate(table, len(tokens) - match.num_tokens, match), "no room"
    cache.publish(table, tokens[match.num_tokens :])
    cache.release(table)
    return match.num_tokens // _TOKENS


def cache_of(capacity: int, name: str, clock: Clock) -> KVCache:
    """A cache that holds exactly `capacity` blocks; no memory is touched, since nothing is computed."""
    geometry = ModelGeometry((_GROUP,), Form.FP32, 4096, (RopeSpec(tuple([0.1] * 32)),))
    extent = 2 * 8 * _TOKENS * 8 * 64 * 4
    limit = capacity * extent + extent * 9 // 10  # tables fit in what is left, one more extent does not
    settings = CacheConfig(
        memory_bytes=limit, block_tokens=_TOKENS, kv="full", cached_share_ratio=1.0, cached_idle_s=1e6, replacement=name
    )
    return KVCache(geometry, settings, b"trace", clock)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_has_the_same_hits_inside_the_cache(name: str) -> None:
    capacity = 120
    trace = read_block_trace(block_trace_path(policy.CHAT)).requests[:400]
    requests = [BlockRequest(r.at_s, r.ids[:60]) for r in trace]
    now = 0.0
    cache = cache_of(capacity, name, lambda: now)
    simulated = replay(requests, maker(name), capacity).hits
    for request, hits in zip(requests, simulated, strict=True):
        now = request.at_s
        assert hits_inside(cache, request) == hits
    assert 0 < sum(simulated) < ceiling(requests)
    assert cache.stats().num_blocks == capacity
    cache.check_integrity()
    cache.close()


def test_a_scan_inside_the_cache_does_not_evict_what_is_used_again() -> None:
    """As below and in `bench policy`, through the cache itself: 10,000 blocks read once, a prefix every 50 requests."""
    now, kept = 0.0, []
    cache = cache_of(500, "adaptive", lambda: now)
    for number, request in enumerate(scan_requests(10_000, every=50)):  # 490 blocks between two readings, and 20
        now = request.at_s
        hits = hits_inside(cache, request)
        if number % 50 == 0:
            kept.append(hits)
    assert kept[10:] == [20] * (len(kept) - 10)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_pinned_inside_the_cache_survives_a_scan(name: str) -> None:
    now = 0.0
    cache = cache_of(100, name, lambda: now)
    prefix, *scan = scan_requests(2_000)
    hits_inside(cache, prefix)
    assert cache.advice.pin(tokens_of(prefix)) is not None
    for request in scan[:-1]:
        now = request.at_s
        if request.ids != prefix.ids:
            hits_inside(cache, request)
    assert hits_inside(cache, prefix) == 20
    cache.check_integrity()
    cache.close()


# --- scans, pins, hints


@pytest.mark.parametrize("name", ["s3fifo", "arc", "hazard", "adaptive"])
def test_a_scan_does_not_evict_what_is_used_again(name: str) -> None:
    requests = scan_requests(30_000)
    assert scan_survival(maker(name), requests, 1000) == 1.0
    assert scan_survival(maker("lru"), requests, 1000) < 1.0


@pytest.mark.parametrize("name", POLICIES)
def test_pins_survive_anything_up_to_their_cap(name: str) -> None:
    cache = Replay(maker(name), 100, pin_limit=30)
    cache.serve(BlockRequest(0.0, range(25)))
    cache.serve(BlockRequest(0.0, range(1000, 1010)))
    retention = cache.retention
    assert retention.pin([e for e in retention if e.key < 1000])  # type: ignore[operator]  # keys are numbers here
    assert not retention.pin([e for e in retention if e.key >= 1000])  # type: ignore[operator]
    assert retention.pinned_bytes == 25
    for request in scan_requests(20_000)[1:]:
        cache.serve(BlockRequest(request.at_s, [i + 10_000 for i in request.ids]))
        assert len(retention) <= 100
    assert cache.serve(BlockRequest(1e6, range(25))) == 25
    retention.check_integrity()


def test_right_hints_close_much_of_the_gap() -> None:
    requests = read_block_trace(block_trace_path(policy.CHAT)).requests[:3000]
    capacity = 2000
    base = sum(replay(requests, maker("lru"), capacity).hits)
    best = optimum(requests, capacity)
    oracle = HintOracle(requests, accuracy=1.0, seed=1)
    hinted = sum(replay(requests, lambda clock: Bands(make_policy("lru", clock), clock), capacity, oracle.after).hits)
    assert (hinted - base) / (best - base) > 0.4


# --- traces


def test_a_recorded_and_a_mooncake_trace(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 2000, "input_length": 100, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 500, "input_length": 128, "output_length": 5, "hash_ids": [1, 3]},
    ]
    text = "\n".join(map(json.dumps, lines))
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"format": "ktransformer-trace/1", "block_tokens": 64}) + "\n" + text)
    expected = [BlockRequest(0.5, [1, 3]), BlockRequest(2.0, [1, 2], last_is_partial=True)]
    assert list(read_block_trace(path).requests) == expected
    packed = tmp_path / "mooncake.jsonl.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    partial = [dataclasses.replace(request, last_is_partial=True) for request in expected]
    assert list(read_block_trace(packed).requests) == partial


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("{", r"t\.jsonl:1 is no JSON"),
        ('{"timestamp": 1}', r"t\.jsonl:1 is no request"),
        ('{"format": "other/1"}', "format 'other/1' is not known"),
        ("7", r"t\.jsonl:1 is no request"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_block_trace(path)


def test_agents_are_whole_sessions_drawn_by_seed() -> None:
    path = block_trace_path(policy.AGENTIC)
    trace = read_agentic(path, Interleaving(3, max_touches=60_000))
    assert trace == read_agentic(path, Interleaving(3, max_touches=60_000))
    assert 20_000 < trace.num_touches <= 60_000
    assert [r.at_s for r in trace.requests] == sorted(r.at_s for r in trace.requests)
    above: dict[int, int | None] = {}
    for request in trace.requests:
        for n, i in enumerate(request.ids):
            before = request.ids[n - 1] if n else None
            assert above.setdefault(i, before) == before


def test_an_own_trace_is_replayed_with_every_policy(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    rows = [{"timestamp": n, "input_length": 128, "output_length": 1, "hash_ids": [n % 5, n]} for n in range(9, 200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    outcome = policy.run(BenchOptions(quick=True, trace=str(path)))
    assert [row["policy"] for row in outcome.rows] == [*POLICIES, *POLICIES]
    assert outcome.summary == {}


def test_a_part_alone_gives_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those over all traces are left out; the agents' and the scan's parts have none of their own."""
    few = read_block_trace(block_trace_path(policy.CHAT))
    few = dataclasses.replace(few, requests=few.requests[:200])
    monkeypatch.setattr(policy, "read_block_trace", lambda path: few)
    outcome = policy.run(BenchOptions(quick=True, parts=("chat",)))
    assert set(outcome.summary) == {"gap_closed_chat_2pct", "gap_closed_chat_10pct", "us_per_touch"}
    assert [row["policy"] for row in outcome.rows] == ["lru", "arc", "adaptive"] * 2
    hinted = policy.run(BenchOptions(quick=True, parts=("hints",)))
    assert set(hinted.summary) == {"gap_closed_hints_2pct", "gap_closed_hints_10pct", "normalised_hints_10pct"}
    both = set(outcome.summary) | set(hinted.summary)
    rest = {"gap_closed_chat_5pct", "worst_below_best", "mean_below_best"}  # a full run's, and those over all traces
    assert set(targets_of("policy")) == both | rest


def test_more_or_fewer_of_the_agents_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Interleaving] = []

    def read(path: Path, how: Interleaving) -> BlockTrace:
        asked.append(how)
        return BlockTrace("agents", [BlockRequest(float(n), [n % 5, 5 + n]) for n in range(60)])

    monkeypatch.setattr(policy, "read_agentic", read)
    options = BenchOptions(quick=True, parts=("agentic",), num_touches=30_000)
    outcome = policy.run(options)
    assert [(row["part"], row["policy"]) for row in outcome.rows] == [
        ("agents", name) for _ in range(2) for name in ("lru", "arc", "adaptive")
    ]
    policy.run(dataclasses.replace(options, num_touches=None))
    assert [how.max_touches for how in asked] == [30_000, 200_000]
    assert not dataclasses.replace(options, quick=False).is_full, "targets are set for two million"
    with pytest.raises(ConfigError, match="leave --touches out"):
        main("memory", options=BenchOptions(num_touches=30_000))


@pytest.mark.slow
def test_the_default_order_finds_more_than_lru_on_a_real_chat() -> None:
    """The whole trace at two sizes: what the targets ask, with room for the next tuning."""
    assert CacheConfig().replacement == "adaptive"
    figures = policy.run(BenchOptions(quick=True, parts=("chat",))).summary
    assert figures["gap_closed_chat_2pct"] >= 0.20
    assert figures["gap_closed_chat_10pct"] >= 0.10


def test_every_figure_has_a_target() -> None:
    chat = policy.Bed.of(read_agentic(block_trace_path(policy.AGENTIC), Interleaving(3, max_touches=20_000)))
    scores = policy.compare(chat, (0.1,), ("lru", "arc", "adaptive"))
    assert policy.below_best(scores)[0] >= 0
    assert set(targets_of("policy")) >= {"worst_below_best", "us_per_touch", "gap_closed_hints_10pct"}
