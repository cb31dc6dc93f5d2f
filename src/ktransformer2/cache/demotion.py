"""Blocks on their way down: which are worth keeping below the device, when they are copied, and that parents go first.

`WRITE_POLICIES` say when a block is offered:

    write_through_selective   when a prompt found it or a caller pins it, and what is left at the orderly end
    write_through             when it is full, and what is left at the orderly end
    write_back                when it leaves the device, and what is left at the orderly end

Knows no token and no file. Copies are bounded per call and charged to the limit; nothing waits but `end`.

That a block lies below is known of those that this process wrote or read, as long as its tiers do not deny it. A filter
alone is no proof: one false positive in a chain, and nothing behind it could be kept. Where a tier outlives the process
only such tiers count: what host memory alone has would be gone with it.

Invariants: a block is offered after its parent; the bytes charged are those of payloads that the writer still holds.
"""

from __future__ import annotations

import time
from collections import Counter

from ktransformer2.cache.block import Block
from ktransformer2.cache.residency import Residency
from ktransformer2.memory.arena import Arena
from ktransformer2.tiers.tally import LOG
from ktransformer2.tiers.tier import ROOT, StoredBlock
from ktransformer2.tiers.write_combiner import WriteCombiner

_MOST_WANTED = 4096  # blocks that wait to be copied
_MOST_KNOWN = 65_536  # keys that are remembered to lie below: some 10 MB
_RECORD_BYTES = 24 * 2**10  # what a tier may count for a payload beside itself: header, padding, pages of an index
_WANTS = {
    "limit": "room in a tier",
    "time": "time",
    "tier": "a tier that takes them",
    "room": "memory to copy them",
    "left": "memory to copy others",
    "buffer": "a buffer",
    "parent": "the block before them",
}
_MOST_FAILURES = 3  # failed transfers after which the orderly end gives up: a full disk stays full


class KnownKeys:
    """The newest keys that lie below the device, or are on their way: two generations, the old one is forgotten."""

    def __init__(self, capacity: int = _MOST_KNOWN) -> None:
        self._capacity = capacity
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, key: bytes) -> None:
        if len(self._young) >= self._capacity // 2:
            self._young, self._old = set(), self._young
        self._young.add(key)

    def discard(self, key: bytes) -> None:
        self._young.discard(key)
        self._old.discard(key)


class Demotion:
    """The way down of one cache's blocks, through `combiner`."""

    def __init__(self, residency: Residency, arena: Arena, combiner: WriteCombiner, policy: str) -> None:
        self._residency, self._arena, self._combiner, self._policy = residency, arena, combiner, policy
        self.known = KnownKeys()
        self.charged_bytes = 0
        self.skipped: Counter[str] = Counter()  # blocks that were not taken, by why
        self._wanted: dict[bytes, Block] = {}  # in the order in which they are to be copied
        self._ended = False
        self._num_failures = 0  # since the end began

    # --- what happens to a block

    def filled(self, block: Block) -> None:
        """It is full and can be found."""
        if self._policy == "write_through":
            self.want(block)

    def found(self, block: Block) -> None:
        """A prompt found it."""
        if self._policy != "write_back":
            self.want(block)

    def pinned(self, block: Block) -> None:
        """It is to stay: after the end of the process too."""
        if self._policy != "write_back":
            self.want(block)

    def leaving(self, block: Block) -> None:
        """It leaves the device next. Its parents go down before it, as far as the buffer takes them."""
        if self._policy == "write_back" and block.key is not None and not self._ended:
            self._settle()
            self._offer_chain(block)

    def want(self, block: Block) -> None:
        """Copy it down when there is time; its parents come first. One that lies there, or is no full block, is not."""
        if block.key is None or self._ended:
            return
        key = stored_key(block)
        if key in self._wanted or self.lies_below(key):
            return
        if len(self._wanted) >= _MOST_WANTED:
            self.skipped["queue"] += 1
            return
        self._wanted[key] = block

    # --- copying

    def copy(self, budget_bytes: int) -> None:
        """Hand wanted blocks to the writer, about `budget_bytes` of them; what finds no room there waits."""
        self._settle()
        while self._wanted and budget_bytes > 0:
            key, block = next(iter(self._wanted.items()))
            if block.key is None or stored_key(block) != key:
                self.skipped["left"] += 1
            elif not self._fits(block):
                return
            else:
                budget_bytes -= self._payload_bytes(block)
                self._offer_chain(block)
            del self._wanted[key]

    def end(self, limit_s: float) -> bool:
        """The orderly end: of all full blocks what fits the tiers goes down once, the last used first. Waits.

        False: not all of it went down in `limit_s`. What is not kept below is counted in `skipped`, and said in one
        line of the log. Side effect: blocks that nobody uses are evicted, where they do not fit below or their room is
        needed for copies.
        """
        deadline = time.monotonic() + limit_s
        skipped, failed = Counter(self.skipped), self._combiner.stats().failed_blocks
        self._ended = True
        self._wanted.clear()
        if most_bytes := self._combiner.begin_end():
            self._evict_surplus(most_bytes)
            self._write_what_fits(deadline)
        done = self._combiner.close(max(0.0, deadline - time.monotonic()))
        self._settle()
        stats = self._combiner.stats()
        self.skipped["time"] += stats.left_blocks
        lost = self.skipped - skipped + Counter(tier=stats.failed_blocks - failed)
        if lost:
            reasons = ", ".join(f"{count:,} for want of {_WANTS[why]}" for why, count in lost.items())
            LOG.warning("%d full blocks are not kept for the next time: %s", lost.total(), reasons)
        return done

    def _evict_surplus(self, most_bytes: float) -> None:
        """Let go what the roomiest tier could not keep, in the order in which blocks leave: prefixes stay whole."""
        surplus = sum(map(self._taken_below, self._full_blocks())) - most_bytes
        self._residency.retention.worth = None  # that a block lies below already makes it worth no less there

        def note(block: Block) -> bool:
            nonlocal surplus
            if block.key is not None:
                surplus -= self._taken_below(block)
                self.skipped["limit"] += not self.lies_below(stored_key(block))
            return False

        while surplus > 0 and self._residency.evict_one("end", note):
            pass

    def _write_what_fits(self, deadline: float) -> None:
        """Offer blocks until none fits, or the time is over, or the tiers take nothing; count those that are left."""
        blocks = {stored_key(block): block for block in self._last_used_first()}
        why, size = "", 0
        for key, block in blocks.items():
            size += self._taken_below(block)
            if not why and not self._combiner.narrow(size, deadline - time.monotonic()):
                why = "limit" if time.monotonic() < deadline else "time"
            elif not why and time.monotonic() >= deadline:
                why = "time"
            elif not why and self._num_failures >= _MOST_FAILURES:
                why = "tier"
            if self.lies_below(key):
                continue
            if block.key is None:
                self.skipped["left"] += 1
            elif why or not self._end_with(block, deadline):
                self.skipped[why or "time"] += 1

    def _full_blocks(self) -> list[Block]:
        return [block for index in self._residency.indexes for block in index if block.key is not None]

    def _last_used_first(self) -> list[Block]:
        """Full blocks, those in use before all others; each behind the ones before it."""
        ordered: dict[Block, None] = {}
        for block in sorted(self._full_blocks(), key=lambda block: (block.references == 0, -block.last_used)):
            chain: list[Block] = []
            step: Block | None = block
            while step is not None and step not in ordered:
                chain.append(step)
                step = None if step.begins else self._residency.indexes[block.group].get(step.parent)
            ordered.update(dict.fromkeys(reversed(chain)))
        return list(ordered)

    def _end_with(self, block: Block, deadline: float) -> bool:
        """Offer a block, and the parents that are still missing. False: the time is over."""
        for each in self._chain(block):
            size = self._payload_bytes(each)
            if not self._combiner.wait_for_room(size, deadline - time.monotonic()):
                return False
            self._settle()
            if not self._residency.charge(size):
                self.skipped["room"] += 1  # all of the limit is in use: nothing can be copied
                return True
            self._arena.discharge(size)
            if each.key is not None:  # else it has just been evicted
                self._offer(each)
        return True

    def _offer_chain(self, block: Block) -> None:
        for each in self._chain(block):
            if not self._offer(each):
                return

    def _chain(self, block: Block) -> list[Block]:
        """The block and those before it that do not lie below yet, the first one first. Empty: a parent is nowhere."""
        index, holds_parent = self._residency.indexes[block.group], self._holds_parent(block)
        chain: list[Block] = []
        next_block: Block | None = block
        while next_block is not None and next_block.key is not None:
            if self.lies_below(stored_key(next_block)):
                return chain[::-1]
            chain.append(next_block)
            if next_block.begins or not holds_parent:
                return chain[::-1]
            if self.lies_below(next_block.parent + bytes((block.group,))):
                return chain[::-1]
            next_block = index.get(next_block.parent)
        self.skipped["parent"] += 1
        return []

    def _offer(self, block: Block) -> bool:
        """Copy a block whose parent lies below. False: the buffer or the limit has no room."""
        key = stored_key(block)
        if self._combiner.holds(key):
            self.known.add(key)
            return True
        payload_bytes = self._payload_bytes(block)
        if not self._fits(block):
            self.skipped["buffer"] += 1
            return False
        if not self._arena.charge(payload_bytes):
            self.skipped["room"] += 1
            return False
        store = self._residency.stores[block.group]
        parent = ROOT if block.begins else block.parent + key[-1:]
        try:
            payload = store.read_sealed(block)
        except MemoryError:  # the limit had room, the machine has not
            self._arena.discharge(payload_bytes)
            self.skipped["room"] += 1
            return False
        stored = StoredBlock(key, parent, block.rows, payload, holds_parent=self._holds_parent(block))
        if not self._combiner.offer(stored):
            self._arena.discharge(payload_bytes)
            self.skipped["buffer"] += 1
            return False
        self.charged_bytes += payload_bytes
        self.known.add(key)
        return True

    def _settle(self) -> None:
        """What the writer let go no longer counts; what no tier took may be offered again."""
        freed = self._combiner.take_freed()
        self._arena.discharge(freed)
        self.charged_bytes -= freed
        failed = self._combiner.take_failed()
        self._num_failures += self._ended and bool(failed)
        for key in failed:
            self.known.discard(key)

    def lies_below(self, key: bytes) -> bool:
        """Whether the block is known to lie in a tier, or to be on its way there. `key`: as tiers have it."""
        return self._combiner.holds(key) or (key in self.known and self._combiner.may_hold(key))

    def _fits(self, block: Block) -> bool:
        return self._combiner.held_bytes + self._payload_bytes(block) <= self._combiner.limit_bytes

    def _taken_below(self, block: Block) -> int:
        return self._payload_bytes(block) + _RECORD_BYTES

    def _payload_bytes(self, block: Block) -> int:
        return self._residency.stores[block.group].sealed_layout.extent_bytes

    def _holds_parent(self, block: Block) -> bool:
        return self._residency.stores[block.group].group.window is None

    def check_integrity(self) -> None:
        accounted = self._combiner.accounted_bytes()
        assert accounted == self.charged_bytes, f"{accounted} bytes with the writer, {self.charged_bytes} charged"
        held = self._combiner.held_bytes
        assert held <= self._combiner.limit_bytes, f"the writer holds {held} of {self._combiner.limit_bytes} bytes"
        assert len(self._wanted) <= _MOST_WANTED, f"{len(self._wanted)} blocks are wanted"


def stored_key(block: Block) -> bytes:
    """The key of a full block below the device: its prefix hash, then its layer group."""
    assert block.key is not None, f"{block} has no key"
    return block.key + bytes((block.group,))
