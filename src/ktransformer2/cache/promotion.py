"""Blocks on their way up: what a waiting prompt lacks and a tier has is brought to the device before its turn comes.

    begin    which blocks; load or recompute?      -> a `Fetch`, or none
    receive  at the start of a step: place what came, ask for more
    is_loading / end                                 for whoever waits

What has come is indexed and used by nobody, so the ordinary `match` finds it. Payloads in flight are charged to the
limit before they are read, and bounded. Knows no token, no request and no file.

Invariants: `charged_bytes` are those of transfers that have not arrived; of what a waiting prompt rests on, nothing is
evicted to bring up what one behind it lacks.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ktransformer2.cache.block import Block
from ktransformer2.cache.residency import Residency
from ktransformer2.memory.arena import Arena
from ktransformer2.tiers.prefetcher import Arrival, Prefetcher
from ktransformer2.tiers.rates import LoadOrRecompute
from ktransformer2.tiers.tier import Payload

T = TypeVar("T")
Turn = tuple[int, ...]
_SLICE_BYTES = 8 * 2**20  # one transfer; 512 KB are enough for a disk's pace, and more at once hides a server's delay
# How long a prompt is held for its blocks: as long as computing them would take, which at worst doubles its wait.
LEAST_PATIENCE_S, MOST_PATIENCE_S = 0.05, 30.0


@dataclass(frozen=True)
class Wanted:
    """One full block that is to come: its prefix hash, the one before it, its tokens' bytes, its layer group."""

    group: int
    key: bytes
    parent: bytes
    tokens: bytes = field(repr=False)
    begins: bool

    @property
    def stored_key(self) -> bytes:
        return self.key + bytes((self.group,))


class Fetch:
    """One prompt's blocks on their way. `others`: fetches that bring some of them already.

    `rests_on`: the keys of blocks that are here, or come, and that its blocks continue. `rank`: less goes first.
    """

    def __init__(self, ticket: int, turn: Turn, wanted: Sequence[Wanted], patience_s: float, now: float) -> None:
        self.ticket = ticket
        self.rank = (turn, ticket)
        self.patience_s = patience_s
        self.began_s = now
        self.held_s: float | None = None  # since when its prompt would have had its turn
        self.others: set[Fetch] = set()
        self.rests_on = {each.parent for each in wanted}
        self.waiting: deque[Wanted] = deque(wanted)
        self.sent: dict[bytes, Wanted] = {}
        self.placed: set[Block] = set()
        self.is_over = False  # its prompt has had its turn, or is gone

    @property
    def is_complete(self) -> bool:
        """Nothing of its own is to come any more."""
        return not (self.waiting or self.sent)

    @property
    def has_come(self) -> bool:
        """Nor of what others bring for it."""
        return self.is_complete and all(other.is_complete for other in self.others)


@dataclass
class PromotionCounters:
    """Blocks that were read, and what became of them; tokens not worth reading; seconds of fetches.

    `loaded` = placed + late + homeless (no room, or what they continue is gone). `used` and `unused` (evicted before a
    prompt found them) are of the placed. `held_s` is the part of `fetch_s` for which a prompt was held back that could
    have had its turn.
    """

    loaded: int = 0
    used: int = 0
    unused: int = 0
    late: int = 0
    homeless: int = 0
    not_worth_tokens: int = 0
    fetch_s: float = 0.0
    held_s: float = 0.0
    restored_tokens: Counter[str] = field(default_factory=Counter)


class Promotion:
    """The way up of one cache's blocks, through `prefetcher`."""

    def __init__(
        self,
        residency: Residency,
        arena: Arena,
        prefetcher: Prefetcher,
        limit_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """`limit_bytes` bounds the payloads in flight."""
        self._residency, self._arena, self._prefetcher = residency, arena, prefetcher
        self._limit_bytes, self._clock = limit_bytes, clock
        self.speeds = LoadOrRecompute()
        self.counters = PromotionCounters()
        self.charged_bytes = 0
        self._charges: dict[tuple[bytes, ...], int] = {}
        self._fetches: dict[int, Fetch] = {}
        self._coming: dict[bytes, Fetch] = {}
        self._num_begun = 0

    # --- for whoever waits

    def begin(self, wanted: Sequence[Wanted], num_tokens: int, turn: Turn) -> Fetch | None:
        """Bring up `wanted`, parents first, so that `num_tokens` more are found. None: computing them is faster."""
        now = self._clock()
        num_bytes = self._in_flight_bytes() + sum(self._payload_bytes(each.group) for each in wanted)
        estimate = self.speeds.estimate(num_tokens, num_bytes, now)
        if not estimate.is_worth_loading:
            self.counters.not_worth_tokens += num_tokens
            return None
        patience = MOST_PATIENCE_S if estimate.compute_s is None else estimate.compute_s
        own = [each for each in wanted if each.stored_key not in self._coming]
        patience = min(max(patience, LEAST_PATIENCE_S), MOST_PATIENCE_S)
        fetch = Fetch(self._num_begun, turn, own, patience, now)
        fetch.others = {self._coming[each.stored_key] for each in wanted if each.stored_key in self._coming}
        for other in fetch.others:
            other.rank = min(other.rank, fetch.rank)
        self._num_begun += 1
        self._fetches[fetch.ticket] = fetch
        self._coming.update((each.stored_key, fetch) for each in own)
        self._send()
        return fetch

    def is_loading(self, fetch: Fetch) -> bool:
        """Whether its prompt, whose turn has come, should wait for it a little longer. Not for ever."""
        if fetch.is_over or fetch.has_come:
            return False
        now = self._clock()
        if fetch.held_s is None:
            fetch.held_s = now
        return now - fetch.held_s < fetch.patience_s

    def end(self, fetch: Fetch) -> None:
        """Its prompt has had its turn, or is gone: what still comes is late, but for prompts that wait for it too."""
        if fetch.is_over:
            return
        fetch.is_over = True
        now = self._clock()
        self.counters.held_s += 0.0 if fetch.held_s is None else now - fetch.held_s
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        """Fetches that nobody waits for read no more; those that have nothing to come are forgotten."""
        needed = {other for fetch in self._fetches.values() if not fetch.is_over for other in fetch.others}
        for fetch in list(self._fetches.values()):
            if not fetch.is_over or fetch in needed:
                continue
            for each in fetch.waiting:
                self._coming.pop(each.stored_key, None)
            fetch.waiting.clear()
            if fetch.sent:
                self._prefetcher.cancel(fetch.ticket)
            else:
                del self._fetches[fetch.ticket]

    # --- a step

    def receive(self) -> list[tuple[bytes, str]]:
        """Place what has come, and ask for more; the keys of what came, each with the tier that had it.

        Bounded by what is in flight; never waits.
        """
        arrived: list[tuple[bytes, str]] = []
        for arrival in self._prefetcher.arrivals():
            arrived += zip(arrival.keys, arrival.tiers, strict=False)
            self._take(arrival)
        if self._fetches:
            self._drop_unwanted()
            self._send()
        return arrived

    def wait(self, limit_s: float) -> bool:
        """Sleep until something came, at most `limit_s`: for an engine that has nothing else to do."""
        return self._prefetcher.wait(limit_s)

    def _take(self, arrival: Arrival) -> None:
        charged = self._charges.pop(arrival.keys)
        self._arena.discharge(charged)
        self.charged_bytes -= charged
        fetch, now = self._fetches[arrival.ticket], self._clock()
        if arrival.payloads:
            self.speeds.loaded(arrival.num_bytes, arrival.seconds, now)
            self.speeds.waited(max(0.0, time.monotonic() - arrival.done_s), now)
        self.counters.loaded += len(arrival.payloads)
        wanted = [fetch.sent.pop(key) for key in arrival.keys]
        for each in wanted:
            self._coming.pop(each.stored_key, None)
        pairs = list(zip(wanted, arrival.payloads, arrival.tiers, strict=False))
        num_placed = 0
        while num_placed < len(pairs) and self._place(fetch, *pairs[num_placed]):
            num_placed += 1
        self.counters.homeless += len(pairs) - num_placed
        if num_placed < len(wanted):
            self._cut(fetch, wanted[0].group)
        if fetch.is_complete:
            self.counters.fetch_s += now - fetch.began_s

    def _place(self, fetch: Fetch, wanted: Wanted, payload: Payload, tier: str) -> bool:
        """Make a block of a payload. False: no room for it, or nothing that it continues; the rest is not wanted."""
        index, store = self._residency.indexes[wanted.group], self._residency.stores[wanted.group]
        is_wanted = not fetch.is_over or any(fetch in other.others for other in self._fetches.values())
        if index.get(wanted.key) is not None or not is_wanted:
            self.counters.late += 1  # computed meanwhile, or nobody waits for it any more
            return True
        near = index.get(wanted.parent)
        if near is None and not wanted.begins and store.group.window is None:
            return False  # lost below, or evicted here
        block = self._room(fetch, lambda: store.new_block(keep_open=False, near=near))
        if block is None:
            return False
        store.write_sealed(block, payload)
        block.references, block.begins, block.came_from = 1, wanted.begins, tier
        block.published_s = self._clock()
        index.add(block, wanted.parent, wanted.tokens, full=True)
        fetch.placed.add(block)
        self._residency.unrefer(block)
        return True

    def _cut(self, fetch: Fetch, group: int) -> None:
        """A chain ends here: what continues it is not asked for."""
        kept = [each for each in fetch.waiting if each.group != group]
        for each in fetch.waiting:
            if each.group == group:
                self._coming.pop(each.stored_key, None)
        fetch.waiting = deque(kept)

    # --- asking

    def _send(self) -> None:
        """Ask for as much as the limits allow, in the order of the turns."""
        for fetch in sorted(self._fetches.values(), key=lambda fetch: fetch.rank):
            while fetch.waiting:
                part = self._next_part(fetch)
                keys = tuple(each.stored_key for each in part)
                size = len(part) * self._payload_bytes(part[0].group)
                if self.charged_bytes and self.charged_bytes + size > self._limit_bytes:
                    return
                if self._room(fetch, partial(self._charge, size)) is None:
                    return
                if not self._prefetcher.submit(fetch.ticket, keys):
                    self._arena.discharge(size)
                    return
                self.charged_bytes += size
                self._charges[keys] = size
                for each in part:
                    fetch.sent[each.stored_key] = fetch.waiting.popleft()

    def _next_part(self, fetch: Fetch) -> list[Wanted]:
        """The next blocks of one layer group for one transfer."""
        group = fetch.waiting[0].group
        most = max(1, min(_SLICE_BYTES, self._limit_bytes) // self._payload_bytes(group))
        part: list[Wanted] = []
        for each in fetch.waiting:
            if each.group != group or len(part) == most:
                break
            part.append(each)
        return part

    def _charge(self, size: int) -> bool | None:
        return self._arena.charge(size) or None

    def _room(self, fetch: Fetch, attempt: Callable[[], T | None]) -> T | None:
        """`attempt()` until it gives something. What nobody waits for is evicted, then what the last in the queue wait
        for, up to `fetch`. None: it rests on what is left itself, or one before it does.
        """
        kept = sorted((each for each in self._fetches.values() if not each.is_over), key=lambda each: each.rank)

        def is_kept(block: Block) -> bool:
            return any(block.key in each.rests_on or block in each.placed for each in kept)

        while (taken := attempt()) is None:
            while not self._residency.evict_one("room", is_kept):
                if not kept or kept[-1].rank <= fetch.rank:
                    return None
                kept.pop()
        return taken

    def _in_flight_bytes(self) -> int:
        """What is read before anything that is asked for now."""
        left = sum(self._payload_bytes(each.group) for fetch in self._fetches.values() for each in fetch.waiting)
        return self.charged_bytes + left

    def _payload_bytes(self, group: int) -> int:
        return self._residency.stores[group].sealed_layout.extent_bytes

    def check_integrity(self) -> None:
        charged = sum(self._charges.values())
        assert charged == self.charged_bytes, f"{charged} bytes in flight, {self.charged_bytes} charged"
        largest = max(self._payload_bytes(group) for group in range(len(self._residency.stores)))
        assert charged <= max(self._limit_bytes, largest), f"{charged} of {self._limit_bytes} bytes in flight"
        sent = {key for fetch in self._fetches.values() for key in fetch.sent}
        assert sent == {key for keys in self._charges for key in keys}, "what was sent is not what is charged"
        coming = {each.stored_key for fetch in self._fetches.values() for each in fetch.waiting} | sent
        assert coming == set(self._coming), f"{len(coming)} blocks to come, {len(self._coming)} known of"
