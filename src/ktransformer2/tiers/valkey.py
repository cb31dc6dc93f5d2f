"""The shared tier: blocks on a Valkey or Redis server, for every process that has the deployment's key.

    put     one pipeline looks what is there, one sends what is not, parents first
    get     a chain by MGET, in pieces of bounded size, up to the first block that is missing or not whole
    filter  a thread scans the names now and then, so that a lookup of what is not there costs no round trip

A server that fails or forgets is a miss and a counter (`redis_client`). What it answers is believed only with the
deployment's signature (`deployment`). A use renews the time to live of a block and of all blocks before it
(`lifetimes`); where the way to the root cannot be found, nothing is renewed, and a new block gets no more than what is
beside it has left. So a parent never expires before its child.

Other processes see what is put at their next refresh. What a server's own eviction takes is a miss like any other; a
block behind it lies there in vain until its time is over.

Invariants: at most `_PIECE_BYTES` of payloads, or one block, are on their way in a call; nothing is deleted that lies
under another deployment's names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self

from ktransformer2.tiers.breaker import CircuitBreaker
from ktransformer2.tiers.deployment import Deployment
from ktransformer2.tiers.header import HEADER_BYTES
from ktransformer2.tiers.lifetimes import Lifetimes
from ktransformer2.tiers.redis_client import RedisClient
from ktransformer2.tiers.shared_filter import SharedFilter
from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.tier import ROOT, Clock, Lineage, StoredBlock, TierStats
from ktransformer2.tiers.valkey_address import ValkeyAddress

_PIECE_BYTES = 8 * 2**20
_NAMES_AT_ONCE = 1000
_MOST_UNKNOWN = 64  # headers that one call asks for to find the way to the root; the next call goes on
MOST_SCANNED = 2**18  # blocks on one server: of more no filter is made, and every lookup asks


class ValkeyTier:
    """Blocks of one lineage on a server. See `Tier` for what the calls promise."""

    name = "remote"
    lasts = True

    def __init__(self, address: ValkeyAddress, lineage: Lineage, key: bytes, clock: Clock = time.monotonic) -> None:
        """`key` is the deployment's. Connects at the first call, and never looks by itself what others wrote: `open`.

        Raises: ConfigError without the package redis.
        """
        self._address, self._lineage = address, lineage
        self._tally = Tally(self.name, clock)
        self._breaker = CircuitBreaker(clock)
        self._client = RedisClient(address, self._breaker, self._tally)
        self._deployment = Deployment(key, lineage)
        self._lifetimes = Lifetimes(address.ttl_s)
        self._filter = SharedFilter()
        self._groups_held = [0] * len(lineage.payload_bytes)  # blocks that the last scan found
        self._scanning = threading.Lock()  # one scan at a time: the filter's thread, `refresh` and `clear`
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, address: ValkeyAddress, lineage: Lineage, key: bytes) -> Self:
        """A tier that looks now and every `bloom_refresh_s` what others wrote, by a thread that `close` ends.

        Raises: ConfigError without the package redis.
        """
        tier = cls(address, lineage, key)
        tier._thread = threading.Thread(target=tier._keep_fresh, name="ktransformer2 valkey filter", daemon=True)
        tier._thread.start()
        return tier

    def may_hold(self, key: bytes) -> bool:
        """False also while the server is not asked because it failed."""
        passed = not self._breaker.is_open
        held = passed and self._filter.may_hold(key)
        self._tally.count(lookups=1, filter_saved=passed and not held)
        return held

    # --- down

    def put(self, blocks: Sequence[StoredBlock]) -> int:
        held: set[bytes] = set()
        for piece in self._pieces([block for block in blocks if self._is_fit(block)]):
            if not self._put_piece(piece, held):
                break
        return len(held)

    def _is_fit(self, block: StoredBlock) -> bool:
        size = memoryview(block.payload).nbytes
        if not self._lineage.fits(block.group, size):
            self._tally.failed("unfit", f"{size} bytes in layer group {block.group}")
            return False
        if self._deployment.value_bytes(block.group) > self._address.max_value_bytes:
            self._tally.failed("too_large", f"{size} bytes; max_value_bytes={self._address.max_value_bytes}")
            return False
        return True

    def _pieces(self, blocks: Sequence[StoredBlock]) -> Iterator[list[StoredBlock]]:
        piece: list[StoredBlock] = []
        size = 0
        for block in blocks:
            more = self._lineage.payload_bytes[block.group]
            if piece and size + more > _PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.append(block)
            size += more
        if piece:
            yield piece

    def _put_piece(self, piece: list[StoredBlock], held: set[bytes]) -> bool:
        """Store what is not there and renew what is; both come into `held`. False: the server does not answer."""
        keys = {block.key for block in piece}
        outside = {block.parent for block in piece if _needs_parent(block)} - keys - held
        seen = self._client.look([self._deployment.name(key) for key in (*keys, *outside)])
        if seen is None:
            return False
        now_ms, left_ms = seen
        there = {key for key in keys | outside if self._deployment.name(key) in left_ms}
        new = _admitted(piece, there | held)
        ends = [*(block.key for block in piece if block.key in there), *(block.key for block in new)]
        for block in piece:
            self._lifetimes.learn(block.key, block.parent, holds_parent=block.holds_parent)
        self._filter.add(ends)  # before anything is sent: an answer that is lost hides none of them
        expiry_ms, renewed = self._expiry(ends, now_ms, list(left_ms.values()))
        if not self._send(new, renewed, (now_ms, expiry_ms), held):
            return False
        held |= keys & there
        return True

    def _send(
        self, blocks: list[StoredBlock], renewed: list[bytes], times_ms: tuple[int, int], held: set[bytes]
    ) -> bool:
        """Store `blocks` and renew the others, in one pipeline; `times_ms` are now and when all of them expire."""
        now_ms, expiry_ms = times_ms
        keys = {block.key for block in blocks}
        renewed = [key for key in renewed if key not in keys]
        if not blocks and not renewed:
            return True
        values = [(self._deployment.name(block.key), self._deployment.seal(block, now_ms / 1000)) for block in blocks]
        answers = self._client.store([self._deployment.name(key) for key in renewed], values, expiry_ms)
        if answers is None:
            return False
        orphans, size = [], 0
        for block, is_stored in zip(blocks, answers, strict=True):
            if not is_stored:
                self._tally.failed("full", f"{self._address.shown} did not take a block")
            elif _needs_parent(block) and block.parent in keys and block.parent not in held:
                orphans.append(self._deployment.name(block.key))  # its parent was not taken
            else:
                held.add(block.key)
                size += self._lineage.payload_bytes[block.group]
                self._tally.count(stored_blocks=1)
                self._groups_held[block.group] += 1
        if orphans:
            self._client.remove(orphans)
        if size:
            self._tally.count(stored_bytes=size)
            self._tally.transfer(size)
        self._lifetimes.renewed([*renewed, *(keys & held)], expiry_ms)
        return True

    # --- up

    def get(self, keys: Sequence[bytes]) -> list[bytearray]:
        found: list[bytearray] = []
        now_ms = 0
        for piece in self._key_pieces(keys):
            answer = self._client.read([self._deployment.name(key) for key in piece])
            if answer is None:
                break
            now_ms, values = answer
            opened = self._open_leading(piece, values)
            found += opened
            if len(opened) < len(piece):
                break
        if found:
            self._note_use(keys[: len(found)], now_ms)
        return found

    def _key_pieces(self, keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """Keys whose payloads are one transfer, up to the first that no layer group can have."""
        num_groups = len(self._lineage.payload_bytes)
        known = next((at for at, key in enumerate(keys) if key[-1] >= num_groups), len(keys))
        first = size = 0
        for at, key in enumerate(keys[:known]):
            more = self._lineage.payload_bytes[key[-1]]
            if at > first and size + more > _PIECE_BYTES:
                yield keys[first:at]
                first, size = at, 0
            size += more
        if first < known:
            yield keys[first:known]

    def _open_leading(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> list[bytearray]:
        """The payloads up to the first that is missing, foreign or not whole; what is not whole is taken away."""
        opened: list[bytearray] = []
        for key, value in zip(keys, values, strict=True):
            if value is None:
                self._tally.count(filter_false=self._filter.passes(key))
                break
            whole = self._open(key, value)
            if whole is None:
                self._client.remove([self._deployment.name(key)])
                break
            opened.append(whole)
        if opened:
            size = sum(map(len, opened))
            self._tally.count(loaded_blocks=len(opened), loaded_bytes=size)
            self._tally.transfer(size)
        return opened

    def _open(self, key: bytes, value: bytes) -> bytearray | None:
        if not self._deployment.is_signed(key, value):
            self._tally.failed(
                "signature", f"a value on {self._address.shown} is not signed with this deployment's key"
            )
            return None
        whole = self._deployment.unseal(key, value)
        if whole is None:
            self._tally.failed("checksum", f"a value on {self._address.shown} is not what it says it is")
            return None
        header, payload = whole
        self._lifetimes.learn(key, header.parent, holds_parent=header.holds_parent)
        return payload

    def _note_use(self, keys: Sequence[bytes], now_ms: int) -> None:
        self._filter.add(keys)
        expiry_ms, renewed = self._expiry(keys, now_ms, [])
        if renewed and self._client.store([self._deployment.name(key) for key in renewed], [], expiry_ms) is not None:
            self._lifetimes.renewed(renewed, expiry_ms)

    # --- time to live

    def _expiry(self, keys: Sequence[bytes], now_ms: int, left_ms: Sequence[int]) -> tuple[int, list[bytes]]:
        """Until when these blocks are to be kept, and which have to be renewed for that, with those before them.

        Where the way to the root cannot be found: no longer than anything beside them (`left_ms`), and nothing.
        """
        expiry_ms = self._lifetimes.expiry_ms(now_ms)
        if all(self._finds_root(key) for key in keys):
            return expiry_ms, self._lifetimes.due(keys, expiry_ms)
        return min([expiry_ms, *(now_ms + left for left in left_ms if left >= 0)]), []

    def _finds_root(self, key: bytes) -> bool:
        """Learn the parents of a block up to the root; the server is asked for those that nobody here has seen."""
        for _ in range(_MOST_UNKNOWN):
            unknown = self._lifetimes.unknown(key)
            if unknown == ROOT:
                return True
            starts = self._client.starts([self._deployment.name(unknown)], HEADER_BYTES)
            header = self._deployment.header(unknown, starts[0]) if starts else None
            if header is None:
                return False
            self._lifetimes.learn(unknown, header.parent, holds_parent=header.holds_parent)
        return False

    # --- what others wrote

    def refresh(self) -> bool:
        """Look at all names of this lineage and make the filter anew. False: that broke off, and the old one stays."""
        with self._scanning:
            self._filter.begin_scan()
            found = self._scan()
            self._tally.count(filter_missed=self._filter.end_scan(found))
            if found is None:
                return False
            groups = [key[-1] for key in found]
            self._groups_held = [groups.count(group) for group in range(len(self._lineage.payload_bytes))]
            return True

    def _scan(self) -> set[bytes] | None:
        found: set[bytes] = set()
        for page in self._client.scan(self._deployment.names):
            if page is None or self._closing.is_set():
                return None
            found.update(key for key in map(self._deployment.key, page) if key is not None)
            if len(found) > MOST_SCANNED:
                self._tally.failed("scan", f"more than {MOST_SCANNED} blocks; no filter is made of so many")
                return None
        return found

    def _keep_fresh(self) -> None:
        while not self._closing.is_set():
            self.refresh()
            self._closing.wait(self._address.bloom_refresh_s)

    # --- away

    def _remove(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Delete what lies under names: how many, and their bytes. As far as the server answers."""
        count = size = 0
        for first in range(0, len(names), _NAMES_AT_ONCE):
            answer = self._client.remove(names[first : first + _NAMES_AT_ONCE])
            if answer is None:
                break
            count, size = count + answer[0], size + answer[1]
        return count, size

    def clear(self) -> int:
        """Delete all lineages of this deployment, and nothing else that lies there; bytes freed."""
        freed, is_whole = 0, True
        with self._scanning:
            self._lifetimes.forget()
            self._filter.begin_scan()
            for page in self._client.scan(self._deployment.all_names):
                is_whole = page is not None
                freed += self._remove(page or ())[1]
            self._filter.end_scan(() if is_whole else None)
            if is_whole:
                self._groups_held = [0] * len(self._groups_held)
        return freed

    def stats(self) -> TierStats:
        """What is held is what the last refresh found, and what this process has stored since. No limit is known."""
        sizes = self._lineage.payload_bytes
        held_bytes = sum(count * size for count, size in zip(self._groups_held, sizes, strict=True))
        return self._tally.stats(sum(self._groups_held), held_bytes, 0)

    def close(self) -> None:
        self._closing.set()
        self._client.close()
        if self._thread is not None:
            self._thread.join(self._address.timeout_s)


def _needs_parent(block: StoredBlock) -> bool:
    return block.holds_parent and block.parent != ROOT


def _admitted(piece: Sequence[StoredBlock], there: set[bytes]) -> list[StoredBlock]:
    """The blocks that are to be sent: not there yet, with their parent there or sent before them."""
    admitted: list[StoredBlock] = []
    there = set(there)
    for block in piece:
        if block.key not in there and (not _needs_parent(block) or block.parent in there):
            admitted.append(block)
            there.add(block.key)
    return admitted
