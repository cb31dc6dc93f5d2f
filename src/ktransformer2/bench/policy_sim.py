"""Replays a trace against a policy, and finds what no policy can pass. Knows no scenario and prints nothing.

The model, for policies and optimum alike: capacity is a number of blocks. A request's leading blocks that are cached
are hits; its others are brought in, each evicting one block if there is no room; while a request is served none of its
blocks can leave. Of a request longer than the capacity only the first blocks that fit are cached. Requests are served
one after another.

The optimum. Between two uses a block is either kept (the second use is a hit) or not. When a request is served, the
request's own blocks and those kept across it must fit. So it is a choice of intervals, at most `capacity - |request|`
over each request, and dropping the interval that ends last whenever there are too many is best (Belady; for intervals:
Carlisle and Lloyd, 1995). A parent is used whenever its child is, so its interval never ends later: the choice is
prefix-closed, and no policy of this model has more hits. Only uses from `counted_from` on count; intervals that end
before are free to drop.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ktransformer2.bench.policy_trace import BlockRequest
from ktransformer2.cache.replacement.policy import Clock, Entry, ReplacementPolicy
from ktransformer2.cache.replacement.retention import Retention

MakePolicy = Callable[[Clock], ReplacementPolicy]


@dataclass(frozen=True)
class Replayed:
    """`hits[i]`: leading blocks of request i that were cached. `us_per_touch`: processor time, the replay included."""

    hits: list[int]
    us_per_touch: float

    def hits_from(self, first: int) -> int:
        return sum(self.hits[first:])


class Replay:
    """A cache of `capacity` blocks, without blocks."""

    def __init__(self, make: MakePolicy, capacity: int, *, pin_limit: int = 0) -> None:
        self.now_s = 0.0
        self.capacity = capacity
        self.retention = Retention(make(lambda: self.now_s), lambda: self.now_s, pin_limit_bytes=pin_limit)

    def serve(self, request: BlockRequest) -> int:
        """One request, from arrival to release; how many leading blocks were there."""
        self.now_s = request.at_s
        retention = self.retention
        ids = request.ids[: self.capacity]
        path: list[Entry] = []
        for key in ids:
            entry = retention.get(key)
            if entry is None:
                break
            retention.use(entry)
            path.append(entry)
        hits = len(path)
        for _ in range(len(retention) + len(ids) - hits - self.capacity):
            victim = retention.victim()
            if victim is None:  # pins leave less room than the request needs
                ids = ids[: self.capacity - len(retention) + hits]
                break
            retention.evict(victim)
        partial = len(request.ids) - 1 if request.last_is_partial else -1
        for i in range(hits, len(ids)):
            path.append(retention.admit(ids[i], ids[i - 1] if i else None, 1, full=i != partial))
        for entry in reversed(path):
            retention.release(entry)
        return hits


def replay(
    requests: Sequence[BlockRequest],
    make: MakePolicy,
    capacity: int,
    after: Callable[[Replay, int], None] | None = None,
) -> Replayed:
    """All requests in order. `after(replay, i)` is called when request i is done (hints)."""
    cache = Replay(make, capacity)
    hits = []
    collects = gc.isenabled()
    gc.disable()  # as timeit does: what the collector costs depends on all else that is alive
    try:
        began = time.thread_time()
        for i, request in enumerate(requests):
            hits.append(cache.serve(request))
            if after is not None:
                after(cache, i)
        spent_s = time.thread_time() - began
    finally:
        if collects:
            gc.enable()
    touches = sum(len(request.ids[:capacity]) for request in requests)
    return Replayed(hits, 1e6 * spent_s / max(touches, 1))


def optimum(requests: Sequence[BlockRequest], capacity: int, counted_from: int = 0) -> int:
    """The most hits that requests from `counted_from` on can have, or a little more where that is not 0.

    A block is kept for its next use if that is counted. Then one whose next use comes before takes no room, though what
    continues it may be kept: the figure is a bound that cannot be reached, and shares of the way to it are too small.
    """
    kept_for = [0] * len(requests)  # how many blocks are kept until each request, which uses them next
    latest: list[int] = []  # a heap of such requests, negative: the last one comes first
    hits = num_kept = 0
    for r, (request, uses) in enumerate(zip(requests, _next_uses(requests, capacity), strict=True)):
        hits += kept_for[r]
        num_kept -= kept_for[r]
        kept_for[r] = 0
        room = capacity - len(request.ids[:capacity])
        while num_kept > room:
            dropped = min(kept_for[-latest[0]], num_kept - room)
            kept_for[-latest[0]] -= dropped
            num_kept -= dropped
            if not kept_for[-latest[0]]:
                heappop(latest)
        for following, count in uses.items():
            if following >= counted_from:
                if not kept_for[following]:
                    heappush(latest, -following)
                kept_for[following] += count
                num_kept += count
    return hits


def _next_uses(requests: Sequence[BlockRequest], capacity: int) -> list[Counter[int]]:
    """For each request how many of its blocks each later one is the next to use; -1: none is."""
    seen: dict[int, int] = {}
    uses: list[Counter[int]] = []
    for r in range(len(requests) - 1, -1, -1):
        ids = requests[r].ids[:capacity]
        uses.append(Counter(seen.get(i, -1) for i in ids))
        seen.update(dict.fromkeys(ids, r))
    return uses[::-1]


def ceiling(requests: Sequence[BlockRequest], counted_from: int = 0) -> int:
    """Hits of requests from `counted_from` on in a cache without a limit."""
    seen: set[int] = set()
    hits = 0
    for r, request in enumerate(requests):
        if r >= counted_from:
            hits += sum(i in seen for i in request.ids)
        seen.update(request.ids)
    return hits


def scan_requests(num_one_off: int, prefix_blocks: int = 20, every: int = 100) -> list[BlockRequest]:
    """A million documents read once, ten blocks each, and one prefix that every `every`-th request reads."""
    requests: list[BlockRequest] = []
    first_id = prefix_blocks
    while first_id < num_one_off + prefix_blocks:
        at_s = float(len(requests))
        if len(requests) % every == 0:
            requests.append(BlockRequest(at_s, range(prefix_blocks)))
        else:
            requests.append(BlockRequest(at_s, range(first_id, first_id + 10)))
            first_id += 10
    return requests


def scan_survival(make: MakePolicy, requests: Sequence[BlockRequest], capacity: int, every: int = 100) -> float:
    """Share of the prefix's blocks that were there when it was read, the first ten readings apart."""
    hits = replay(requests, make, capacity).hits[::every][10:]
    return sum(hits) / (len(hits) * len(requests[0].ids))
