"""Signs of life for a replay, as a server that knows its sessions would give them, and wrong as often as asked.

A trace's sessions are those it names, or else the subtrees below what many texts share. After each request of a session

- `ended` is said of all the session's own blocks if this was its last request;
- `superseded` is said of what an earlier request of the session left beside the new path, if none of it is used again.

Each of these statements is turned into its opposite with the chance `1 - accuracy`, by the seed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from ktransformer2.bench.policy_sim import Replay
from ktransformer2.bench.policy_trace import BlockRequest
from ktransformer2.cache.replacement.bands import Bands

_SHARED_BY = 8  # what so many different texts continue belongs to no session


class HintOracle:
    """Knows the whole trace. `after` is what `replay` calls."""

    def __init__(self, requests: Sequence[BlockRequest], accuracy: float, seed: int) -> None:
        self._requests = requests
        self._wrong = 1.0 - accuracy
        self._rng = random.Random(seed)
        self._own_from = _own_from(requests)
        self._sessions = [
            request.session if request.session >= 0 else (request.ids[own] if own < len(request.ids) else -1)
            for request, own in zip(requests, self._own_from, strict=True)
        ]
        self._last_request = {session: r for r, session in enumerate(self._sessions)}
        self._last_use = {i: r for r, request in enumerate(requests) for i in request.ids}
        self._blocks: dict[int, dict[int, None]] = defaultdict(dict)  # of each session, as seen so far, in order

    def after(self, cache: Replay, r: int) -> None:
        """Say what is to be said once request r is done. Side effects: bands of the cache's policy."""
        session = self._sessions[r]
        if session < 0:
            return
        own = self._requests[r].ids[self._own_from[r] :]
        blocks, path = self._blocks[session], set(own)
        aside = [i for i in blocks if i not in path]
        if aside and self._say(all(self._last_use[i] <= r for i in aside)):
            self._tell(cache, aside)
        blocks.update(dict.fromkeys(own))
        if self._say(self._last_request[session] == r):
            self._tell(cache, [*blocks])
        if self._last_request[session] == r:
            del self._blocks[session]

    def _say(self, truth: bool) -> bool:
        return truth != (self._rng.random() < self._wrong)

    @staticmethod
    def _tell(cache: Replay, blocks: Sequence[int]) -> None:
        bands = cache.retention.policy
        assert isinstance(bands, Bands), "hints need bands around the policy"
        found = (cache.retention.get(i) for i in reversed(blocks))
        bands.ended([entry for entry in found if entry is not None])


def _own_from(requests: Sequence[BlockRequest]) -> list[int]:
    """For each request the place of its first block that is its session's own."""
    children: dict[int, set[int]] = defaultdict(set)
    for request in requests:
        for above, below in zip(request.ids, request.ids[1:], strict=False):
            children[above].add(below)
    shared = {above for above, below in children.items() if len(below) >= _SHARED_BY}
    return [max((n for n, i in enumerate(request.ids) if i in shared), default=-1) + 1 for request in requests]
