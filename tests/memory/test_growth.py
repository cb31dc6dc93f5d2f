"""The growth policy: exact steps, and walks that show its bounds on waste, events and swinging."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformer2.memory import GrowthPolicy, PoolUse
from tests.memory.factories import policy


@pytest.mark.parametrize(
    ("use", "asked", "expected"),
    [
        # A pool that holds nothing: asked x 1.2, whole chunks of 256 tokens, at most one chunk above what is asked.
        (PoolUse(0, 0, 64), 1, 4),
        (PoolUse(0, 0, 64), 4, 4),
        (PoolUse(0, 0, 64), 14, 16),
        (PoolUse(0, 0, 64), 20, 24),
        (PoolUse(0, 0, 64), 125, 128),
        (PoolUse(0, 0, 16), 1, 16),
        (PoolUse(0, 0, 256), 1, 2),
        (PoolUse(0, 0, 256), 5, 6),
        # Later: a chunk, or what is missing in whole chunks; nothing while enough is free.
        (PoolUse(10, 0, 64), 1, 4),
        (PoolUse(10, 1, 64), 1, 0),
        (PoolUse(10, 1, 64), 2, 4),
        (PoolUse(10, 1, 64), 10, 12),
        (PoolUse(10, 0, 64), 0, 4),
        # Large pools: 1/128 of what is used; the first growths in a row are smaller; due below 20 % of the step.
        (PoolUse(12800, 0, 64, growths_in_row=0), 1, 4),
        (PoolUse(12800, 0, 64, growths_in_row=1), 1, 8),
        (PoolUse(12800, 0, 64, growths_in_row=5), 1, 32),
        (PoolUse(12800, 0, 64, growths_in_row=8), 1, 100),
        (PoolUse(12800, 0, 64, growths_in_row=10**6), 1, 100),
        (PoolUse(12800, 20, 64, growths_in_row=8), 1, 0),
        (PoolUse(12800, 19, 64, growths_in_row=8), 1, 100),
        (PoolUse(12800, 19, 64, growths_in_row=8), 300, 284),
    ],
)
def test_commits(use: PoolUse, asked: int, expected: int) -> None:
    assert policy().extents_to_commit(use, asked) == expected


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (PoolUse(100, 50, 64, tokens_since_check=99), 0),
        (PoolUse(100, 6, 64, tokens_since_check=100), 0),
        (PoolUse(100, 7, 64, tokens_since_check=100), 3),
        (PoolUse(0, 68, 64, tokens_since_check=100), 64),
        (PoolUse(0, 80, 64, tokens_since_check=100), 64),
        (PoolUse(0, 80, 256, tokens_since_check=100), 16),
        (PoolUse(12800, 150, 64, tokens_since_check=100), 0),
        (PoolUse(12800, 151, 64, tokens_since_check=100), 51),
    ],
)
def test_gives_back(use: PoolUse, expected: int) -> None:
    assert policy().extents_to_give_back(use) == expected


def test_every_knob_has_its_effect() -> None:
    empty, small, large = PoolUse(0, 0, 64), PoolUse(100, 0, 64), PoolUse(12800, 50, 64, 3, 100)
    assert policy(initial_headroom_ratio=1.0).extents_to_commit(empty, 20) == 20
    assert policy(min_chunk_tokens=1024).extents_to_commit(small, 1) == 16
    assert policy(growth_factor=1.0).extents_to_commit(large, 51) == 4
    assert policy(growth_factor=1000).extents_to_commit(large, 51) == 100
    assert policy(growth_factor=1000, low_free_ratio=0.6).extents_to_commit(large, 1) == 100
    assert policy(growth_factor=1000, low_free_ratio=0.5).extents_to_commit(large, 1) == 0
    many = PoolUse(100, 12, 64, tokens_since_check=100)
    assert policy(shrink_threshold_ratio=0.0).extents_to_give_back(many) == 0
    assert policy(shrink_threshold_ratio=1.0).extents_to_give_back(many) == 8
    assert policy(shrink_check_tokens=101).extents_to_give_back(many) == 0


@given(
    used=st.integers(0, 10**6),
    free=st.integers(0, 10**5),
    asked=st.integers(0, 10**4),
    extent_tokens=st.sampled_from([16, 32, 64, 128, 256]),
    growths_in_row=st.integers(0, 100),
)
def test_covers_what_is_asked_and_never_shrinks_what_it_just_grew(
    used: int, free: int, asked: int, extent_tokens: int, growths_in_row: int
) -> None:
    rule = policy()
    use = PoolUse(used, free, extent_tokens, growths_in_row)
    grown = rule.extents_to_commit(use, asked)
    assert grown % rule.least_extents(use) == 0
    assert free + grown >= asked
    if grown:
        after = PoolUse(used + asked, free + grown - asked, extent_tokens, growths_in_row + 1, tokens_since_check=10**6)
        assert after.free <= 1.2 * rule.chunk_extents(after)
        assert rule.extents_to_give_back(after) == 0
    crowded = PoolUse(used, free, extent_tokens, growths_in_row, tokens_since_check=10**6)
    given_back = rule.extents_to_give_back(crowded)
    assert 0 <= given_back <= free
    if given_back:
        assert rule.extents_to_commit(PoolUse(used, free - given_back, extent_tokens), 1) == 0


class Walk:
    """A pool as numbers: allocations and frees under the policy, with a shrink check after each."""

    def __init__(self, rule: GrowthPolicy) -> None:
        self.rule = rule
        self.use = PoolUse(0, 0, 64)
        self.growths = self.shrinks = self.allocated = 0
        self.free_share: list[float] = []

    def step(self, change: int) -> None:
        """Allocate (positive) or free (negative) that many extents, one by one."""
        for _ in range(abs(change)):
            used, free, tokens, row, since = self.use
            if change > 0:
                grown = self.rule.extents_to_commit(self.use, 1)
                self.growths += grown > 0
                self.allocated += 1
                self.use = PoolUse(used + 1, free + grown - 1, tokens, row + (grown > 0), since + 64)
            elif used:
                self.use = PoolUse(used - 1, free + 1, tokens, row, since + 64)
        given = self.rule.extents_to_give_back(self.use)
        row = 0 if given else self.use.growths_in_row
        since = self.use.tokens_since_check
        self.shrinks += given > 0
        self.use = PoolUse(self.use.used, self.use.free - given, 64, row, 0 if since >= 100 and not given else since)
        if self.use.used > 300:
            self.free_share.append(self.use.free / (self.use.used + self.use.free))

    @property
    def growths_per_1k_tokens(self) -> float:
        return self.growths / (self.allocated * 64) * 1000


def test_waste_and_events_stay_bounded_under_chat_traffic() -> None:
    """32 sequences of log-normal length (mean 1,400 tokens), each freed whole when it ends."""
    rng, walk = random.Random(7), Walk(policy())

    def blocks() -> int:
        return max(1, round(rng.lognormvariate(6.9, 0.8) / 64))

    held = [0] * 32
    wanted = [blocks() for _ in held]
    for _ in range(40_000):
        i = rng.randrange(32)
        if held[i] < wanted[i]:
            held[i] += 1
            walk.step(1)
        else:
            walk.step(-held[i])
            held[i], wanted[i] = 0, blocks()
    assert walk.growths_per_1k_tokens <= 4
    assert sum(walk.free_share) / len(walk.free_share) <= 0.01


@pytest.mark.parametrize("level", [0, 40, 3000])
def test_coming_and_going_around_any_level_does_not_swing(level: int) -> None:
    """The worst of all amplitudes: allocate n and free n again, for each n around the size of a chunk."""
    for amplitude in range(1, 40):
        walk = Walk(policy())
        walk.step(level)
        walk.growths = walk.shrinks = walk.allocated = 0
        for _ in range(50):
            walk.step(amplitude)
            walk.step(-amplitude)
        assert walk.growths_per_1k_tokens <= 5, f"amplitude {amplitude}: {walk.growths_per_1k_tokens:.1f}"
        if amplitude <= 2:
            assert walk.growths <= 1
