"""When memory is committed and when it is given back. Pure: counts in, a count out; knows no address.

The knobs come from `CacheConfig`. The unit is the **chunk**, the amount that one steady growth commits:

    least = min_chunk_tokens (256) in extents, rounded up
    chunk = max(least, used / 128), a multiple of least

Growth, on an allocation or a reservation of `asked` extents with `free` committed and unused ones:
    low_free_ratio (0.20)         due when fewer than `asked`, or less than this share of the step, is free;
    initial_headroom_ratio (1.2)  a pool that holds nothing commits asked x 1.2, at most one `least` above it;
    growth_factor (1.5)           each growth in a row (no shrink in between) is a larger step: least x 1.5^n,
                                  at most one chunk;
    min_chunk_tokens (256)        every growth is a multiple of `least`.
Shrink, looked at once `shrink_check_tokens` (100) tokens came or went:
    shrink_threshold_ratio (0.5)  due when less than this share of the newest three chunks of committed memory is
                                  used, that is when free > (1 - 0.5) x 3 chunks; one chunk stays free, and at most
                                  16 x least goes at once (the next call goes on).

Why the ratios are taken over chunks, not over all that is committed: 1.2 x everything is 16.7 % free, and 0.5 of
everything lets half of the memory lie idle. Over chunks, with U extents used, at most 1.5 chunks are free after a
check: 6 extents or 1.2 % of U, whichever is more; about half of that on average.
Why it does not swing: a growth ends with at most 0.2 + 1 chunks free and a shrink is due above 1.5, so 0.3 chunks
must be freed in between; a shrink ends with 1 chunk free and a growth is due below 0.2, so 0.8 chunks must be
allocated in between. Hence, whatever the order of calls, 1000 / 256 = 3.9 growths per 1,000 allocated tokens while
`least` is the chunk (a growth is then due only when nothing is free), and fewer with larger chunks:
1000 / (0.8 x 512) = 2.4 from the next size on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ktransformer2.config import CacheConfig
from ktransformer2.layout import round_up

# 1/128 of what is used may stand free per chunk: 0.8 %, a third of the 2 % that half-filled last blocks of 64 tokens
# cost at the mean length of chat traffic (1,400 tokens).
_CHUNKS_IN_USE = 128
_SHRINK_WINDOW_CHUNKS = 3
# 4,096 tokens by default, eight times what a step of 512 tokens takes. Giving back scattered extents costs about 50 us
# each, plus what the system takes to free them: without a bound the end of a very long text would hold up everybody.
_MOST_LEASTS_PER_SHRINK = 16


class PoolUse(NamedTuple):
    """What a policy sees of a pool. Units: extents; `extent_tokens` and `tokens_since_check` tokens."""

    used: int
    free: int
    extent_tokens: int
    growths_in_row: int = 0
    tokens_since_check: int = 0


@dataclass(frozen=True)
class GrowthPolicy:
    """The decisions of growing and shrinking, from the knobs of `config`. See the module for what each knob means."""

    config: CacheConfig

    def least_extents(self, use: PoolUse) -> int:
        """The smallest step, `min_chunk_tokens`, in extents."""
        return -(-self.config.min_chunk_tokens // use.extent_tokens)

    def chunk_extents(self, use: PoolUse) -> int:
        """What one steady growth commits, in extents."""
        least = self.least_extents(use)
        return max(least, use.used // _CHUNKS_IN_USE // least * least)

    def extents_to_commit(self, use: PoolUse, asked: int) -> int:
        """How many extents to commit before `asked` are allocated; 0: no growth is due.

        More than `asked - use.free` is headroom: a caller that is short of room may commit only that much.
        """
        assert asked >= 0, f"asked for {asked} extents"
        missing = max(0, asked - use.free)
        step = self._step(use)
        if not missing and use.free >= self.config.low_free_ratio * step:
            return 0
        least = self.least_extents(use)
        if use.used == 0 and use.free == 0:
            with_headroom = min(math.ceil(asked * self.config.initial_headroom_ratio), asked + least)
            return max(round_up(asked, least), with_headroom // least * least)
        return round_up(max(missing, step), least)

    def extents_to_give_back(self, use: PoolUse) -> int:
        """How many free extents to give back to the system now; 0: no check or no shrink is due."""
        if use.tokens_since_check < self.config.shrink_check_tokens:
            return 0
        chunk = self.chunk_extents(use)
        kept_without_shrink = (1 - self.config.shrink_threshold_ratio) * _SHRINK_WINDOW_CHUNKS * chunk
        if use.free <= kept_without_shrink:
            return 0
        return min(max(0, use.free - chunk), _MOST_LEASTS_PER_SHRINK * self.least_extents(use))

    def _step(self, use: PoolUse) -> int:
        """least x growth_factor^n, at most a chunk; compared as logarithms, since the power has no bound."""
        least, chunk, factor = self.least_extents(use), self.chunk_extents(use), self.config.growth_factor
        if factor <= 1 or chunk == least:
            return least
        if use.growths_in_row * math.log(factor) >= math.log(chunk / least):
            return chunk
        return int(least * factor**use.growths_in_row)
