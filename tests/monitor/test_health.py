"""The four figures and their marks, at their limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ktransformer2.cache.stats import CacheStats
from ktransformer2.monitor.health import health
from tests.cache.factories import make_cache

NOTHING = make_cache().stats()


def judged(name: str, **counters: Any) -> tuple[str, str]:
    """(what is shown, mark) of one figure."""
    (figure,) = (each for each in health(dataclasses.replace(NOTHING, **counters)) if each.name.startswith(name))
    return figure.shown, figure.mark


@pytest.mark.parametrize(
    ("hit", "findable", "expected"),
    [
        (850, 1000, ("85.0 %", "early")),
        (4095, 4095, ("100.0 %", "early")),
        (3482, 4096, ("85.0 %", "ok")),
        (3481, 4096, ("85.0 %", "RED")),  # 84.99 %
        (0, 0, ("-", "n/a")),
    ],
)
def test_hit_rate(hit: int, findable: int, expected: tuple[str, str]) -> None:
    assert judged("hit rate", hit_tokens=hit, findable_tokens=findable, lookup_tokens=10_000) == expected


@pytest.mark.parametrize(
    ("events", "tokens", "expected"),
    [
        (0, 0, ("-", "n/a")),
        (7, 100, ("70.00", "early")),
        (8, 1601, ("5.00", "ok")),
        (8, 1600, ("5.00", "RED")),
    ],
)
def test_growth(events: int, tokens: int, expected: tuple[str, str]) -> None:
    assert judged("growth", growth_events=events, computed_tokens=tokens) == expected


@pytest.mark.parametrize(
    ("ratio", "blocks", "expected"),
    [(0.9, 31, ("90.0 %", "early")), (0.3, 32, ("30.0 %", "ok")), (0.301, 32, ("30.1 %", "RED"))],
)
def test_fragmentation(ratio: float, blocks: int, expected: tuple[str, str]) -> None:
    assert judged("fragmentation", fragmentation_ratio=ratio, num_blocks=blocks) == expected


@pytest.mark.parametrize(
    ("used", "fetched", "expected"),
    [
        (0, 0, ("-", "n/a")),
        (1, 31, ("3.2 %", "early")),
        (75, 100, ("75.0 %", "ok")),
        (90, 100, ("90.0 %", "ok")),
        (74, 100, ("74.0 %", "RED")),
        (91, 100, ("91.0 %", "RED")),
    ],
)
def test_prefetch_accuracy(used: int, fetched: int, expected: tuple[str, str]) -> None:
    assert judged("prefetch", prefetch_used_blocks=used, prefetched_blocks=fetched) == expected


def test_what_cannot_be_judged_says_why() -> None:
    notes = {figure.name: figure.note for figure in health(NOTHING) if figure.mark == "n/a"}
    assert notes == {
        "hit rate": "no repeats seen",
        "growth per 1,000 tokens": "nothing computed yet",
        "prefetch accuracy": "nothing was fetched ahead",
    }


def test_states_sum_to_what_is_held() -> None:
    from ktransformer2.monitor import mock
    from ktransformer2.monitor.states import state_blocks, state_bytes

    stats = CacheStats.from_json(mock.answer(3)["cache"])
    assert sum(state_bytes(stats).values()) == stats.held_bytes
    assert sum(state_blocks(stats).values()) == stats.num_blocks
    assert stats.filling_bytes + stats.sealed_bytes + stats.cached_bytes == stats.used_bytes
