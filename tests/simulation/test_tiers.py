"""Thousands of seeded steps over a cache and its tiers, with all their faults mixed; a failure prints its seed.

No model: a token's rows are a function of all tokens before it, so a block that came up under a wrong prefix, or from
another salt, shows itself. No threads: what is written and read, and when, is drawn from the seed too.

SIMULATION_STEPS=100000 is the long run, of less than two minutes; without it there are as many as fit a quarter of one.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from ktransformer2.cache.block import BlockTable
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.promotion import Fetch
from ktransformer2.config import WRITE_POLICIES
from ktransformer2.tiers.host import HostTier
from tests.cache.factories import FULL_GROUP, WINDOW_GROUP, Clock, append, assert_rows, compute, make_cache
from tests.cache.tier_driving import cache_over, figures, lower_of, no_threads
from tests.simulation.faulty_tier import FaultyTier, Weather

NUM_STEPS = int(os.environ.get("SIMULATION_STEPS", "16000"))
SEEDS = (1, 2, 3, 4)
CHECK_EVERY = 100
MOST_RUNNING, MOST_WAITING = 5, 5
TEXTS = [[(i * i + 7 * text) % 11 for i in range(220)] for text in range(4)]
SALTS = (b"", b"", b"another")


@dataclass
class Prompt:
    """A request that waits."""

    tokens: list[int]
    salt: bytes
    fetch: Fetch | None
    chain: list[bytes] = field(default_factory=list)


@dataclass
class Running:
    """A table, and how many more of its tokens it is to read."""

    table: BlockTable
    tokens: list[int]


class Simulation:
    """One cache at a time over the same tiers, as a machine that is started again and again."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.groups = rng.choice([(FULL_GROUP,), (FULL_GROUP, WINDOW_GROUP), (WINDOW_GROUP,)])
        self.kv = rng.choice(["full", "int8"])
        self.tiers = [FaultyTier(name, rng, rng.choice([30, 400])) for name in ("disk", "remote")]
        self.restored = self.started = 0
        self.cache = self.open()

    def open(self) -> KVCache:
        rng = self.rng
        self.waiting: list[Prompt] = []
        self.running: list[Running] = []
        settings: dict[str, Any] = {
            "groups": self.groups,
            "clock": self.clock,
            "kv": self.kv,
            "memory_bytes": rng.choice([300_000, 1_000_000, 4_000_000]),
            "min_chunk_tokens": 16,
            "cached_share_ratio": rng.choice([0.5, 1.0]),
            "write_policy": rng.choice(WRITE_POLICIES),
            "staging_bytes": rng.choice([1, 40_000, 10**6]),
        }
        probe = make_cache(*self.groups, kv=self.kv)
        host = [HostTier(probe.lineage, rng.choice([100_000, 10**6]))] if rng.random() < 0.5 else []
        probe.close()
        return cache_over(*host, *self.tiers, **settings)

    # --- what happens

    def step(self) -> None:
        rng = self.rng
        weights = {
            self.ask: 3, self.admit: 5, self.go_on: 5, self.leave: 2, self.give_up: 0.3,
            self.write: 3, self.read: 4, self.maintain: 3, self.look: 0.5, self.storm: 0.2, self.clear: 0.05,
            self.defragment: 0.1, self.restart: 0.02,
        }  # fmt: skip
        rng.choices(list(weights), list(weights.values()))[0]()
        self.cache.receive()

    def ask(self) -> None:
        if len(self.waiting) < MOST_WAITING:
            text, length = self.rng.choice(TEXTS), self.rng.randrange(1, 200)
            tokens = text[:length] + [self.rng.randrange(3) for _ in range(self.rng.randrange(20))]
            prompt = Prompt(tokens, self.rng.choice(SALTS), None)
            prompt.fetch = self.cache.fetch(tokens, prompt.salt, prompt.chain, (self.rng.randrange(4),))
            self.waiting.append(prompt)

    def admit(self) -> None:
        if not self.waiting or len(self.running) == MOST_RUNNING:
            return
        prompt = self.waiting[0]
        if prompt.fetch is not None and self.cache.is_loading(prompt.fetch):
            self.clock.now += 0.01
            return
        match = self.cache.match(prompt.tokens, prompt.salt, prompt.chain)
        table = self.cache.new_table(prompt.salt)
        num_new = min(len(prompt.tokens) - match.num_tokens, self.rng.choice([16, 64, 500]))
        if not self.cache.allocate(table, num_new, match):
            self.cache.release(table)
            return
        self.waiting.pop(0)
        if prompt.fetch is not None:
            self.cache.end_fetch(prompt.fetch)
        compute(self.cache, [(table, prompt.tokens[table.num_tokens : table.num_tokens + num_new])])
        self.started += 1
        self.restored += sum(table.restored_tokens.values())
        if self.rng.random() < 0.3:
            assert_rows(self.cache, table, prompt.tokens[: table.num_tokens])
        self.running.append(Running(table, prompt.tokens))

    def go_on(self) -> None:
        if not self.running:
            return
        chosen = self.rng.choice(self.running)
        done = chosen.table.num_tokens
        new = chosen.tokens[done : done + 64] or [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 30))]
        if done + len(new) < 300 and append(self.cache, chosen.table, new):
            chosen.tokens = [*chosen.tokens[:done], *new, *chosen.tokens[done + len(new) :]]

    def look(self) -> None:
        if self.running:
            chosen = self.rng.choice(self.running)
            assert_rows(self.cache, chosen.table, chosen.tokens[: chosen.table.num_tokens])

    def leave(self) -> None:
        if self.running:
            self.cache.release(self.running.pop(self.rng.randrange(len(self.running))).table)

    def give_up(self) -> None:
        if self.waiting:
            prompt = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            if prompt.fetch is not None:
                self.cache.end_fetch(prompt.fetch)

    def write(self) -> None:
        lower_of(self.cache)._combiner.write_batch()

    def read(self) -> None:
        lower_of(self.cache)._prefetcher.read_one()

    def maintain(self) -> None:
        self.clock.now += self.rng.choice([0.0, 0.001, 1.0, 400.0])
        self.cache.computed(self.rng.randrange(1, 500), 0.1)
        self.cache.maintain(1)

    def storm(self) -> None:
        for tier in self.tiers:
            tier.weather = Weather.draw(self.rng)

    def clear(self) -> None:
        self.cache.clear()

    def defragment(self) -> None:
        self.cache.defragment()

    def restart(self) -> None:
        """An orderly end, or none: then nothing is written any more."""
        if self.rng.random() < 0.3:
            self.cache._lower = None
        self.cache.close()
        self.cache = self.open()

    def check(self) -> None:
        self.cache.check_integrity()
        assert self.cache.stats().peak_bytes <= self.cache.config.memory_bytes
        for tier in self.tiers:
            tier.check_integrity()
        stats = figures(self.cache)
        gone = stats.used_blocks + stats.unused_blocks + stats.late_blocks + stats.homeless_blocks
        waiting = sum(bool(block.came_from) for index in self.cache._residency.indexes for block in index)
        assert stats.loaded_blocks == gone + waiting, f"{stats}, {waiting} blocks wait for their prompts"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_never_a_wrong_row_and_never_more_than_the_limit(seed: int) -> None:
    with no_threads():
        simulation = Simulation(seed)
        for number in range(NUM_STEPS // len(SEEDS)):
            try:
                simulation.step()
                if number % CHECK_EVERY == 0:
                    simulation.check()
            except Exception as error:
                raise AssertionError(f"seed {seed}, step {number}: {error}") from error
        simulation.check()
        simulation.cache.close()
    assert simulation.started > NUM_STEPS // len(SEEDS) // 20, f"seed {seed}: {simulation.started} prompts began"
    assert simulation.restored > 0, f"seed {seed}: nothing was ever restored"
