"""Blocks on their way down: gathered into batches of whole extents, written by a thread of its own.

    offer   from the owner of the cache: a copy of a block into the buffer, or no
    flush   wait until all of it is written, or a time is over

Knows no cache and no block on the device; it owns the bytes that are handed to it. The buffer is bounded: what does not
fit is not taken, and is offered again at a later use. A batch goes to every tier in turn, as one transfer each.

Invariants: `held_bytes <= limit_bytes`; blocks are written in the order in which they were offered, so parents first; a
key lies in the buffer at most once; nothing that a tier does ends the thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.tier import StoredBlock, Tier, lasting

# A transfer of some megabytes costs a disk or a server little more than one of some kilobytes: blocks are waited for,
# but not so long that a crash loses much.
_BATCH_BYTES = 8 * 2**20
_LINGER_S = 0.2
_KEPT_SHARE = 15 / 16  # of a tier's limit for records: the rest is its index, and what it keeps free


@dataclass(frozen=True)
class WriteStats:
    """Counts since the combiner was made; written and failed as the lasting tiers have it, where there are any.

    `left_blocks` were taken and not written before the end. `cpu_s`: processor time of the writer's thread.
    """

    offered_blocks: int = 0
    refused_blocks: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    failed_blocks: int = 0
    left_blocks: int = 0
    batches: int = 0
    cpu_s: float = 0.0


class WriteCombiner:
    """The way down to `tiers`, nearest first. `offer`, `take_*`, `flush` and `close` are the owner's; one thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        limit_bytes: int,
        batch_bytes: int = _BATCH_BYTES,
        linger_s: float = _LINGER_S,
    ) -> None:
        """A batch is written when it has `batch_bytes`, or `linger_s` after its first block came."""
        self.limit_bytes = limit_bytes
        self._tiers, self._lasting = tuple(tiers), lasting(tiers)
        self._batch_bytes, self._linger_s = min(batch_bytes, limit_bytes), linger_s
        self._state = threading.Condition()
        self._queue: deque[StoredBlock] = deque()
        self._keys: set[bytes] = set()  # in the queue or being written
        self._queued_bytes = self._writing_bytes = self._freed_bytes = 0
        self._failed: list[bytes] = []
        self._first_s = 0.0  # when the oldest block of the queue came
        self._flushing = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stats = WriteStats()
        self._tallies = {tier.name: Tally(tier.name) for tier in tiers}
        self._kept_bytes: dict[Tier, float] = {}  # since the end began

    # --- the owner's side

    def offer(self, block: StoredBlock) -> bool:
        """Take a block to be written. False: no room in the buffer. One that lies there already is taken for taken."""
        size = len(block.payload)
        with self._state:
            if block.key in self._keys:
                return True
            if self._closed or self.held_bytes + size > self.limit_bytes:
                self._stats = replace(self._stats, refused_blocks=self._stats.refused_blocks + 1)
                return False
            if not self._queue:
                self._first_s = time.monotonic()
            self._queue.append(block)
            self._keys.add(block.key)
            self._queued_bytes += size
            self._stats = replace(self._stats, offered_blocks=self._stats.offered_blocks + 1)
            self._start()
            self._state.notify_all()
        return True

    @property
    def held_bytes(self) -> int:
        """Payloads in the buffer, those being written included."""
        return self._queued_bytes + self._writing_bytes

    def accounted_bytes(self) -> int:
        """`held_bytes` and what `take_freed` will tell, at one moment."""
        with self._state:
            return self.held_bytes + self._freed_bytes

    @property
    def has_ended(self) -> bool:
        """No transfer is under way, and none will be."""
        return self._closed and (self._thread is None or not self._thread.is_alive())

    def holds(self, key: bytes) -> bool:
        """Whether the block is on its way."""
        with self._state:
            return key in self._keys

    def may_hold(self, key: bytes) -> bool:
        """Whether some lasting tier may have the block; False: surely none. No I/O."""
        return any(tier.may_hold(key) for tier in self._lasting)

    def take_freed(self) -> int:
        """Bytes of payloads that were let go since the last call."""
        with self._state:
            freed, self._freed_bytes = self._freed_bytes, 0
        return freed

    def take_failed(self) -> list[bytes]:
        """Keys and parents of batches that no lasting tier kept whole, since the last call: some lie nowhere."""
        with self._state:
            failed, self._failed = self._failed, []
        return failed

    def wait_for_room(self, num_bytes: int, limit_s: float) -> bool:
        """Wait until `num_bytes` fit the buffer, at most `limit_s`."""
        if self._thread is None and self.held_bytes + num_bytes > self.limit_bytes:
            self.write_batch()
        with self._state:
            self._flushing += 1
            self._state.notify_all()
            fits = self._state.wait_for(lambda: self.held_bytes + num_bytes <= self.limit_bytes, max(0.0, limit_s))
            self._flushing -= 1
        return fits

    def flush(self, limit_s: float) -> bool:
        """Wait until all that was offered is written, at most `limit_s`. False: some of it still waits."""
        deadline = time.monotonic() + limit_s
        while self._thread is None and time.monotonic() < deadline and self.write_batch():
            pass
        with self._state:
            self._flushing += 1
            self._state.notify_all()
            done = self._state.wait_for(lambda: not self._keys, max(0.0, limit_s))
            self._flushing -= 1
        return done

    def begin_end(self) -> float:
        """Write from now on only to tiers that last; bytes that the roomiest of them keeps. 0: there is none."""
        self._kept_bytes = {tier: _most_kept(tier) for tier in self._tiers if tier.lasts}
        self._tiers = tuple(self._kept_bytes)
        if not self._tiers:
            self._drop_queue()
        return max(self._kept_bytes.values(), default=0)

    def narrow(self, num_bytes: int, limit_s: float) -> bool:
        """Write no more to a tier that keeps less than `num_bytes`: what it got would go again. False: none is left.

        Waits, at most `limit_s`, until such tiers have what was offered before. False also if they have not got it
        then: it still goes to them.
        """
        roomy = tuple(tier for tier in self._tiers if num_bytes <= self._kept_bytes[tier])
        if len(roomy) < len(self._tiers):
            if not self.flush(limit_s):
                return False
            self._tiers = roomy
        return bool(roomy)

    def close(self, limit_s: float) -> bool:
        """Write what can be written in `limit_s` and end the thread; False: blocks were left behind. Twice is once.

        A transfer that hangs is left to its thread, which ends with it or with the process.
        """
        done = self.flush(limit_s)
        with self._state:
            self._closed = True
            self._stats = replace(self._stats, left_blocks=self._stats.left_blocks + len(self._queue))
            self._drop_queue()
            self._state.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_LINGER_S)  # at once, but for a transfer that hangs
        return done

    def stats(self) -> WriteStats:
        with self._state:
            return self._stats

    # --- the writer's side

    def write_batch(self) -> bool:
        """Write what waits, as one transfer. False: nothing does. The thread's work, and a test's that has none."""
        batch, size = self._take_batch()
        if not batch:
            return False
        held = [(tier, self._put(tier, batch)) for tier in self._tiers]
        kept = max((count for tier, count in held if tier in self._lasting), default=0)
        with self._state:
            self._writing_bytes = 0
            for block in batch:
                self._let_go(block)
            if kept < len(batch):
                self._failed += [key for block in batch for key in (block.key, block.parent)]
            stats = self._stats
            self._stats = replace(
                stats,
                written_blocks=stats.written_blocks + kept,
                written_bytes=stats.written_bytes + size * kept // len(batch),
                failed_blocks=stats.failed_blocks + len(batch) - kept,
                batches=stats.batches + 1,
                cpu_s=time.thread_time(),
            )
            self._state.notify_all()
        return True

    def _take_batch(self) -> tuple[list[StoredBlock], int]:
        """The oldest blocks of the queue, and their bytes."""
        batch: list[StoredBlock] = []
        size = 0
        with self._state:
            while self._queue and (not batch or size + len(self._queue[0].payload) <= self._batch_bytes):
                batch.append(self._queue.popleft())
                size += len(batch[-1].payload)
            self._first_s = time.monotonic()
            self._queued_bytes -= size
            self._writing_bytes = size
        return batch, size

    def _start(self) -> None:
        """Once Python has begun to end it starts no thread: then whoever flushes writes."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="ktransformer2 writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return
            self._thread = thread

    def _run(self) -> None:
        while self._wait_until_due():
            self.write_batch()

    def _wait_until_due(self) -> bool:
        """Sleep until there is enough for a transfer, or the first block has waited. False: closed, nothing is left."""
        with self._state:
            while not (self._is_due() or self._closed):
                self._state.wait(self._first_s + self._linger_s - time.monotonic() if self._queue else None)
            return not self._closed

    def _is_due(self) -> bool:
        if not self._queue:
            return False
        waited = time.monotonic() - self._first_s >= self._linger_s
        return waited or bool(self._flushing) or self._queued_bytes >= self._batch_bytes

    def _put(self, tier: Tier, batch: list[StoredBlock]) -> int:
        """How many of them the tier holds now. A tier promises to raise nothing; one that does has kept nothing."""
        try:
            return tier.put(batch)
        except Exception as error:
            self._tallies[tier.name].failed("put", repr(error))
            return 0

    def _drop_queue(self) -> None:
        with self._state:
            for block in self._queue:
                self._let_go(block)
            self._queue.clear()
            self._queued_bytes = 0

    def _let_go(self, block: StoredBlock) -> None:
        self._keys.discard(block.key)
        self._freed_bytes += len(block.payload)


def _most_kept(tier: Tier) -> float:
    limit_bytes = tier.stats().limit_bytes
    return _KEPT_SHARE * limit_bytes if limit_bytes else math.inf
