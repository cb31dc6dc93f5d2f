"""What a cache does with the tiers below the device: the two ways, what explains them, and what they have counted.

    down   `filled`, `found`, `leaving` say what happens to a block     Demotion, WriteCombiner
    up     `begin`, `receive`, `is_loading`, `end_fetch`                  Promotion, Prefetcher

Knows no prompt and no file. One thread owns it, the cache's; the writer's and the reader's thread own only the bytes
that were handed to them.

Invariant: `staged_bytes`, the copies in flight in either direction, are charged to the limit and bounded.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ktransformer2.cache.block import Block
from ktransformer2.cache.demotion import Demotion
from ktransformer2.cache.promotion import Fetch, Promotion, Turn, Wanted
from ktransformer2.cache.replacement.policy import Entry
from ktransformer2.cache.residency import Residency
from ktransformer2.cache.sizing import sealed_form
from ktransformer2.config import CacheConfig, TierConfig
from ktransformer2.errors import ConfigError
from ktransformer2.layout import NUMERICS_VERSION, ExtentLayout, ModelGeometry
from ktransformer2.memory.arena import Arena
from ktransformer2.tiers.prefetcher import Prefetcher
from ktransformer2.tiers.tier import Lineage, Tier, lasting
from ktransformer2.tiers.write_combiner import WriteCombiner

# Of the limit at most this share is in flight in each direction, whatever `staging_bytes` allows.
_STAGING_SHARE = 8
_CLOSE_S = 1.0  # for a transfer that is being read when the cache closes


@dataclass(frozen=True)
class LowerStats:
    """What the tiers of a cache have done, in blocks, bytes, tokens and seconds as named, since the cache was made.

    Up. Of `loaded_blocks` read from tiers `used_blocks` were found by a prompt, `unused_blocks` evicted before that,
    `late_blocks` came when nobody waited for them any more, `homeless_blocks` found no room. `not_worth_tokens` lay in
    a tier, and computing them was estimated to be faster. `restored_tokens` were found by prompts, by the tier they
    are from. Prompts waited `fetch_s` for their blocks, and `held_s` of that when it was their turn.

    Down. `written_blocks` with `written_bytes` were kept by a tier, `failed_blocks` by none; beside a tier that
    outlives the process, host memory does not count. `skipped_blocks` by why they were not copied: queue or buffer were
    full, no room for the copy, they or their parents had left; at the end also: tiers keep no more (`limit`), the time
    was over, no tier took anything. The writer's thread took `writer_cpu_s` of a processor.

    Now. `staged_bytes` are in flight; `held_blocks` and `held_bytes` by tier, `limit_bytes` too; `failures` by tier and
    kind.
    """

    loaded_blocks: int = 0
    used_blocks: int = 0
    unused_blocks: int = 0
    late_blocks: int = 0
    homeless_blocks: int = 0
    not_worth_tokens: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    failed_blocks: int = 0
    staged_bytes: int = 0
    fetch_s: float = 0.0
    held_s: float = 0.0
    writer_cpu_s: float = 0.0
    restored_tokens: dict[str, int] = field(default_factory=dict)
    skipped_blocks: dict[str, int] = field(default_factory=dict)
    held_blocks: dict[str, int] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)
    limit_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)


def lineage_of(geometry: ModelGeometry, config: CacheConfig, fingerprint: bytes) -> Lineage:
    """What the blocks of such a cache have in common below the device. Raises: ConfigError without a fingerprint."""
    if not fingerprint:
        raise ConfigError(
            "a cache without a fingerprint cannot keep blocks outside of itself: another model's would be taken for "
            "its own. Make it with KVCache(geometry, config, fingerprint), or load the model with load_model()"
        )
    sealed = sealed_form(geometry, config)
    layouts = [ExtentLayout.uniform(group, config.block_tokens, sealed) for group in geometry.groups]
    plan = f"{NUMERICS_VERSION}/{geometry.full_form.name}/{sealed.name}".encode()
    return Lineage(
        fingerprint=hashlib.sha256(len(fingerprint).to_bytes(8, "little") + fingerprint + plan).digest(),
        layouts=tuple(hashlib.sha256(repr(layout).encode()).digest() for layout in layouts),
        payload_bytes=tuple(layout.extent_bytes for layout in layouts),
    )


class LowerTiers:
    """The tiers below one cache, nearest first."""

    def __init__(
        self,
        residency: Residency,
        arena: Arena,
        tiers: Sequence[Tier],
        config: TierConfig,
        clock: Callable[[], float],
    ) -> None:
        """The tiers are this object's from now on: `end` closes them."""
        self._residency, self._arena, self._config = residency, arena, config
        self.tiers = tuple(tiers)
        largest = max(store.sealed_layout.extent_bytes for store in residency.stores)
        limit = max(min(config.staging_bytes, arena.stats.limit_bytes // _STAGING_SHARE), largest)
        self._combiner, self._prefetcher = WriteCombiner(tiers, limit), Prefetcher(tiers)
        self._lasting = {tier.name for tier in lasting(self.tiers)}
        self._passing = [tier for tier in self.tiers if tier.name not in self._lasting]
        self._demotion = Demotion(residency, arena, self._combiner, config.write_policy)
        self._promotion = Promotion(residency, arena, self._prefetcher, limit, clock)
        self._clock = clock
        residency.retention.worth = self._worth
        self._final: LowerStats | None = None
        self._process = os.getpid()
        residency.listener = self

    @property
    def staged_bytes(self) -> int:
        """Copies in flight, up or down, that count against the limit."""
        return self._demotion.charged_bytes + self._promotion.charged_bytes

    # --- asking

    def may_hold(self, group: int, key: bytes) -> bool:
        """Whether some tier may have a group's block of that prefix hash; False: surely none. No I/O."""
        return self._lies_below(key + bytes((group,)))

    def where(self, key: bytes) -> str:
        """The nearest tier that may have a block of that prefix hash; empty: none. No I/O: a yes may be wrong."""
        stored = [key + bytes((group,)) for group in range(len(self._residency.stores))]
        return next((tier.name for tier in self.tiers if any(map(tier.may_hold, stored))), "")

    def _lies_below(self, stored_key: bytes) -> bool:
        return any(tier.may_hold(stored_key) for tier in self.tiers)

    # --- down

    def filled(self, block: Block) -> None:
        """It is full and can be found."""
        self._demotion.filled(block)

    def found(self, blocks: Iterable[Block]) -> dict[str, int]:
        """A prompt found these, parents first; tokens that tiers had kept of them, by tier.

        Side effect: what a tier restored counts once; the policy may have a block written.
        """
        restored: dict[bytes, tuple[str, int]] = {}
        for block in blocks:
            if block.came_from and block.key is not None:
                restored[block.key] = block.came_from, block.rows
                block.came_from = ""
                self._promotion.counters.used += 1
            self._demotion.found(block)
        by_tier: Counter[str] = Counter()
        for tier, num_tokens in restored.values():  # a prefix in several layer groups is one
            by_tier[tier] += num_tokens
        self._promotion.counters.restored_tokens += by_tier
        return dict(by_tier)

    def pinned(self, block: Block) -> None:
        """A caller pins it."""
        self._demotion.pinned(block)

    def leaving(self, block: Block) -> None:
        """It is evicted next."""
        self._promotion.counters.unused += bool(block.came_from)
        self._demotion.leaving(block)

    def copy(self, budget_bytes: int) -> None:
        """Hand about so many bytes of wanted blocks to the writer."""
        self._demotion.copy(budget_bytes)

    # --- up

    def begin(self, wanted: Sequence[Wanted], num_tokens: int, turn: Turn) -> Fetch | None:
        return self._promotion.begin(wanted, num_tokens, turn)

    def is_loading(self, fetch: Fetch) -> bool:
        return self._promotion.is_loading(fetch)

    def end_fetch(self, fetch: Fetch) -> None:
        self._promotion.end(fetch)

    def receive(self) -> None:
        """Take what came up; the start of a step."""
        for key, name in self._promotion.receive():
            if name in self._lasting:
                self._demotion.known.add(key)

    def wait(self, limit_s: float) -> bool:
        """Sleep until something came up, at most `limit_s`."""
        return self._promotion.wait(limit_s)

    def computed(self, num_tokens: int, seconds: float, now: float) -> None:
        """A step read so many tokens of prompts in that time."""
        self._promotion.speeds.computed(num_tokens, seconds, now)

    def _worth(self, entry: Entry) -> float:
        """What it saves to have a block here when it is used, in seconds a byte: to compute it, or where it lies below
        to load it, if that takes less. 0 while nothing was measured.
        """
        num_tokens = self._residency.stores[0].sealed_layout.block_tokens
        estimate = self._promotion.speeds.estimate(num_tokens, entry.num_bytes, self._clock())
        saved_s = estimate.compute_s or 0.0
        if estimate.load_s is not None and isinstance(entry.key, bytes) and self._comes_back(entry.key):
            saved_s = min(saved_s, estimate.load_s)
        return saved_s / entry.num_bytes

    def _comes_back(self, stored_key: bytes) -> bool:
        """Whether a block could be loaded: from what is kept for the next time, or from this process's own memory."""
        return self._demotion.lies_below(stored_key) or any(tier.may_hold(stored_key) for tier in self._passing)

    # --- the end, figures, checks

    def end(self) -> bool:
        """What is full and fits goes down, at most `flush_s` long; tiers are closed. False: not all of it did.

        In a child after fork, which has neither threads nor files of its own, nothing is done.

        A tier that still hangs in a transfer is left open, to end with the process.
        """
        if os.getpid() != self._process:
            return False
        done = self._demotion.end(self._config.flush_s)
        self._final = self.stats()
        if self._prefetcher.close(_CLOSE_S) and self._combiner.has_ended:
            for tier in self.tiers:
                tier.close()
        return done

    def stats(self) -> LowerStats:
        """All figures, as they are now, or as they were at the end. Cost: O(tiers)."""
        if self._final is not None:
            return self._final
        up, down, tiers = self._promotion.counters, self._combiner.stats(), [tier.stats() for tier in self.tiers]
        return LowerStats(
            loaded_blocks=up.loaded,
            used_blocks=up.used,
            unused_blocks=up.unused,
            late_blocks=up.late,
            homeless_blocks=up.homeless,
            not_worth_tokens=up.not_worth_tokens,
            written_blocks=down.written_blocks,
            written_bytes=down.written_bytes,
            failed_blocks=down.failed_blocks,
            staged_bytes=self.staged_bytes,
            fetch_s=up.fetch_s,
            held_s=up.held_s,
            writer_cpu_s=down.cpu_s,
            restored_tokens=dict(up.restored_tokens),
            skipped_blocks=dict(+self._demotion.skipped),
            held_blocks={tier.name: tier.held_blocks for tier in tiers},
            held_bytes={tier.name: tier.held_bytes for tier in tiers},
            limit_bytes={tier.name: tier.limit_bytes for tier in tiers},
            failures={f"{tier.name} {kind}": count for tier in tiers for kind, count in tier.failures.items()},
        )

    def check_integrity(self) -> None:
        self._demotion.check_integrity()
        self._promotion.check_integrity()
        assert self.staged_bytes <= self._arena.stats.charged_bytes, f"{self.staged_bytes} staged bytes are not charged"
