"""Which cached block leaves first. One file a policy; `Retention` says who may leave at all, `Bands` what callers know.

`POLICIES` names what `CacheConfig.replacement` may be.
"""

from __future__ import annotations

from collections.abc import Callable

from ktransformer2.cache.replacement.adaptive import Adaptive
from ktransformer2.cache.replacement.arc import ARC
from ktransformer2.cache.replacement.hazard import Hazard
from ktransformer2.cache.replacement.lfu import LFU
from ktransformer2.cache.replacement.lru import LRU
from ktransformer2.cache.replacement.policy import Clock, ReplacementPolicy
from ktransformer2.cache.replacement.s3fifo import S3FIFO

_UNTIMED: dict[str, Callable[[], ReplacementPolicy]] = {"lru": LRU, "lfu": LFU, "s3fifo": S3FIFO, "arc": ARC}
_TIMED: dict[str, Callable[[Clock], ReplacementPolicy]] = {"hazard": Hazard, "adaptive": Adaptive}
POLICIES = (*_UNTIMED, *_TIMED)


def make_policy(name: str, clock: Clock) -> ReplacementPolicy:
    """A policy by its name in `POLICIES`. `clock`: seconds, never falling."""
    if name in _UNTIMED:
        return _UNTIMED[name]()
    return _TIMED[name](clock)
