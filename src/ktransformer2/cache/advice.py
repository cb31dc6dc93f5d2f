"""What callers know of a text and the cache cannot: pins, priorities, times to live, signs of life. For `KVCache` only.

A pin binds, up to its cap. All else is advice: a wrong word costs a miss, never an answer. What is said holds for the
blocks of the text that are cached or in use at that moment, under one salt; for those that come later it is said again.

Knows no policy: `Bands` and `Retention` do what is said here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ktransformer2.cache.block import Block, token_bytes
from ktransformer2.cache.prefixes import Prefixes
from ktransformer2.cache.replacement.bands import MAX_PRIORITY
from ktransformer2.cache.residency import Residency
from ktransformer2.config import CacheConfig
from ktransformer2.errors import ConfigError, EngineClosedError
from ktransformer2.ownership import Owner


@dataclass(frozen=True, eq=False)
class Pin:
    """What `pin` holds: the first `num_tokens` tokens of a text, 0 when nothing of it was cached. For `unpin`."""

    num_tokens: int
    blocks: tuple[Block, ...] = field(repr=False)


class Advice:
    """`KVCache.advice`. Every call is its owner's; those that return a number say how many blocks heard them.

    `token_ids`: a text from its beginning, under its `salt`. Times are seconds.
    """

    def __init__(self, prefixes: Prefixes, residency: Residency, config: CacheConfig, owner: Owner) -> None:
        """`owner` is the cache's."""
        self._prefixes, self._residency, self._owner = prefixes, residency, owner
        self._block_tokens, self._idle_s = config.block_tokens, config.cached_idle_s
        self._pins: set[Pin] = set()
        self._ended = False

    def pin(self, token_ids: Sequence[int], salt: bytes = b"") -> Pin | None:
        """The whole blocks cached of the text's beginning stay until `unpin`, whatever comes.

        None: pins would hold more than `pinned_share_ratio` of the limit, and nothing has changed. A block that is
        pinned twice counts once, and stays until the second `unpin`.
        """
        self._check_owner()
        blocks, num_tokens = self._prefixes.held(token_ids, salt)
        if not self._residency.pin(blocks):
            return None
        pin = Pin(num_tokens, tuple(blocks))
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """What the pin held may leave again, as if used just now. A second time does nothing."""
        self._check_owner()
        if pin in self._pins:
            self._pins.remove(pin)
            self._residency.unpin(pin.blocks[::-1])

    def prioritise(self, token_ids: Sequence[int], priority: int, salt: bytes = b"") -> int:
        """`priority` above 0: goes after all that has less; below 0: before all that has more; 0: as the policy says.

        Raises: ConfigError beyond 100 either way.
        """
        if abs(priority) > MAX_PRIORITY:
            raise ConfigError(f"priority {priority} is not known; allowed: -{MAX_PRIORITY} to {MAX_PRIORITY}")
        blocks = self._path(token_ids, salt)
        self._residency.hints.prioritise(self._residency.entries(blocks), priority)
        return len(blocks)

    def live(self, token_ids: Sequence[int], ttl_s: float, salt: bytes = b"") -> int:
        """Freed when nobody used it for `ttl_s` seconds, which each use renews; instead of `cached_idle_s`.

        It may leave sooner when room is needed. Raises: ConfigError unless `ttl_s` is above 0.
        """
        self._require_time(ttl_s)
        blocks = self._path(token_ids, salt)
        for entry in self._residency.entries(blocks):
            self._residency.retention.live(entry, ttl_s)
        return len(blocks)

    def waiting(self, token_ids: Sequence[int], ttl_s: float, salt: bytes = b"") -> int:
        """Its session comes back within `ttl_s` seconds (a tool runs, a person types): goes after all else till then.

        Raises: ConfigError unless `ttl_s` is above 0. Side effect: where `ttl_s` is longer than `cached_idle_s` it is
        the blocks' time to live.
        """
        self._require_time(ttl_s)
        blocks = self._path(token_ids, salt)
        self._residency.hints.waiting(self._residency.entries(blocks), ttl_s)
        if ttl_s > self._idle_s:
            for entry in self._residency.entries(blocks):
                self._residency.retention.live(entry, ttl_s)
        return len(blocks)

    def ended(self, token_ids: Sequence[int], salt: bytes = b"") -> int:
        """The session with this text is over. Concerns the blocks that no other cached text goes through."""
        return self.superseded(token_ids, 0, salt)

    def superseded(self, token_ids: Sequence[int], num_kept: int, salt: bytes = b"") -> int:
        """The session went on otherwise behind `num_kept` tokens of this text: what lies there is not needed again."""
        own = self._own(token_ids, num_kept, salt)
        self._residency.hints.ended(self._residency.entries(own))
        return len(own)

    def end(self) -> None:
        """The cache is closed."""
        self._ended = True

    def _check_owner(self) -> None:
        """Raises: as `KVCache` does, which is not held here: it goes when its last user lets go."""
        self._owner.check()
        if self._ended:
            raise EngineClosedError("the cache was closed; make a new one")

    def _path(self, token_ids: Sequence[int], salt: bytes) -> list[Block]:
        """The text's blocks in all layer groups, tail first."""
        return [block for on_it, _ in self._places(token_ids, 0, salt) for block in on_it]

    def _own(self, token_ids: Sequence[int], num_kept: int, salt: bytes) -> list[Block]:
        """Of its blocks behind `num_kept` tokens those below the last place where another text goes on."""
        own: list[Block] = []
        for on_it, others in self._places(token_ids, num_kept // self._block_tokens, salt):
            own += on_it
            if not all(entry.over for entry in self._residency.entries(others)):
                break
        return own

    def _places(self, token_ids: Sequence[int], first: int, salt: bytes) -> Iterator[tuple[list[Block], list[Block]]]:
        """For each block's worth of the text, tail first down to place `first`: its blocks there, full or not, and
        those of other texts that are the same before it.
        """
        self._check_owner()
        data, step = token_bytes(token_ids), 4 * self._block_tokens
        parents = [self._prefixes.root(salt), *self._prefixes.seen_keys(data, salt, [])]
        for place in range(len(parents) - 1, first - 1, -1):
            rest = data[step * place :]
            children = [block for index in self._residency.indexes for block in index.children(parents[place])]
            on_it = [block for block in children if rest.startswith(block.tokens)]
            yield on_it, [block for block in children if not rest.startswith(block.tokens)]

    @staticmethod
    def _require_time(ttl_s: float) -> None:
        if not ttl_s > 0:
            raise ConfigError(f"a time of {ttl_s} seconds is none; allowed: above 0")
