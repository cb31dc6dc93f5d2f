"""The tiers below the device: how blocks travel, what the filter saves, what writing costs, what fetching ahead brings.

    disk      blocks of SmolLM2's size are written and read as a cache does it, and compared byte for byte; reading
              chains through the tier beside a plain sequential read of the same files, pages dropped before each
    filter    the share of absent keys that pass, after every key has been exchanged ten times; and what of a real
              directory's lookups it ends
    writer    processor time of the writer's thread beside that of the steps (`tier_steps`)
    prefetch  requests in a queue whose texts lie on disk (`tier_steps`)

The first two run without a model; a quick run takes a small random one for the others.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ktransformer2.bench.cold_files import drop_pages, read_plainly, resident_share, scratch
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.rounds import ratio, spread
from ktransformer2.bench.shapes import block_bytes, smollm2
from ktransformer2.layout import Form
from ktransformer2.tiers.bloom import BloomFilter
from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits
from ktransformer2.tiers.prefetcher import Prefetcher
from ktransformer2.tiers.tier import ROOT, Lineage, Payload, StoredBlock
from ktransformer2.tiers.write_combiner import WriteCombiner

PARTS = ("disk", "filter", "writer", "prefetch")
_BLOCK_TOKENS, _CHAIN_BLOCKS = 64, 32
_SLICE_BYTES = 8 * 2**20  # what one transfer of a cache brings
_STAGING_BYTES = 64 * 2**20
_WAIT_S = 120.0
_CHURN = 10
_SMALL_BYTES = 1024
Row = dict[str, object]
Result = tuple[list[Row], dict[str, float]]


def run(options: BenchOptions) -> Outcome:
    """All parts, or those asked for."""
    rows: list[Row] = []
    summary: dict[str, float] = {}
    scenario: dict[str, object] = {}
    parts: list[tuple[str, Callable[[Path], Result]]] = [
        ("disk", lambda folder: _disk(folder, options)),
        ("filter", lambda folder: _filter(folder, options)),
    ]
    if options.wants("writer") or options.wants("prefetch"):
        from ktransformer2.bench import tier_steps  # transformers: seconds that the other parts save

        subject = tier_steps.subject(options)
        scenario |= {"dtype": subject.dtype, "model": subject.source}
        parts += [
            ("writer", lambda folder: tier_steps.writer(subject, folder, options)),
            ("prefetch", lambda folder: tier_steps.prefetch(subject, folder, options)),
        ]
    for name, part in parts:
        if options.wants(name):
            with scratch("tiers") as folder:
                more_rows, more = part(folder)
            rows += more_rows
            summary |= more
    return Outcome(rows, summary, scenario)


# --- blocks without a cache


@dataclass(frozen=True)
class Chains:
    """Chains of blocks of one size, whose bytes follow from their keys."""

    count: int
    length: int
    payload_bytes: int

    @property
    def lineage(self) -> Lineage:
        return Lineage(_digest("bench"), (_digest(f"{self.payload_bytes} bytes"),), (self.payload_bytes,))

    def keys(self, chain: int) -> list[bytes]:
        return [key_of(f"{chain}/{place}") for place in range(self.length)]

    def blocks(self) -> Iterator[StoredBlock]:
        for chain in range(self.count):
            parent = ROOT
            for key in self.keys(chain):
                yield StoredBlock(key, parent, _BLOCK_TOKENS, self.payload(key))
                parent = key

    def payload(self, key: bytes) -> bytes:
        return random.Random(key).randbytes(self.payload_bytes)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def key_of(name: str) -> bytes:
    """A key of layer group 0."""
    return _digest(name) + b"\0"


# --- the disk


def _disk(folder: Path, options: BenchOptions) -> Result:
    payload_bytes = block_bytes(smollm2().groups[0], Form.INT8, _BLOCK_TOKENS)
    chains = Chains(1 if options.quick else 16, _CHAIN_BLOCKS, payload_bytes)
    rounds = 2 if options.quick else 12
    tier = DiskTier(folder, DiskLimits(4 * chains.count * chains.length * payload_bytes), chains.lineage)
    prefetcher = Prefetcher([tier])
    try:
        _write(tier, chains)
        say(f"{chains.count * chains.length} blocks come back, byte for byte")
        for payloads, keys in _through_the_tier(prefetcher, chains):
            assert [*map(bytes, payloads)] == [*map(chains.payload, keys)], "what came back is not what was written"
        seconds, rates, share = _read_rounds(folder, prefetcher, chains, rounds, options.seed)
        stats = tier.stats()
    finally:
        prefetcher.close(_WAIT_S)
        tier.close()
    figures = ratio(rates["tier"], rates["plain"])
    part = f"reading {chains.count * chains.length * payload_bytes / 1e6:,.0f} MB, pages dropped"
    rows: list[Row] = [
        {"part": part, "reader": name, "mb_per_s": spread(rates[name]).median / 1e6}
        | {"seconds": spread(seconds[name]).median, "rounds": rounds, "resident_before": share}
        for name in rates
    ]
    return rows, {
        "median_transfer_bytes": float(stats.median_transfer_bytes),
        "disk_read_share": figures.median,
    }


def _write(tier: DiskTier, chains: Chains) -> None:
    """As a cache does: through the bounded buffer, in batches, by the writer's thread."""
    combiner = WriteCombiner([tier], _STAGING_BYTES)
    for block in chains.blocks():
        assert combiner.wait_for_room(chains.payload_bytes, _WAIT_S), "the disk takes nothing"
        assert combiner.offer(block), "there is room, and the block is not taken"
    assert combiner.close(_WAIT_S), "blocks were left behind"
    stats = combiner.stats()
    assert stats.written_blocks == chains.count * chains.length, stats


def _through_the_tier(prefetcher: Prefetcher, chains: Chains) -> Iterator[tuple[list[Payload], tuple[bytes, ...]]]:
    """Every chain in slices, in order, by the reader's thread: payloads with their keys."""
    at_once = max(1, _SLICE_BYTES // chains.payload_bytes)
    slices = [
        keys[start : start + at_once]
        for keys in map(chains.keys, range(chains.count))
        for start in range(0, len(keys), at_once)
    ]
    sent = arrived = 0
    while arrived < len(slices):
        while sent < len(slices) and sent - arrived < _STAGING_BYTES // _SLICE_BYTES:
            assert prefetcher.submit(sent, slices[sent]), "the transfer is not taken"
            sent += 1
        assert prefetcher.wait(_WAIT_S), "the disk gives nothing"
        for arrival in prefetcher.arrivals():
            assert len(arrival.payloads) == len(arrival.keys), f"{len(arrival.payloads)} of {len(arrival.keys)} came"
            arrived += 1
            yield list(arrival.payloads), arrival.keys


def _read_rounds(
    folder: Path, prefetcher: Prefetcher, chains: Chains, rounds: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], float | None]:
    """(seconds, bytes a second) of both readers, round by round; and how much of the files was in memory before."""
    files = sorted(folder.glob("*.kv"))

    def tier() -> int:
        return sum(len(payloads) * chains.payload_bytes for payloads, _ in _through_the_tier(prefetcher, chains))

    readers: dict[str, Callable[[], int]] = {"tier": tier, "plain": lambda: read_plainly(files)}
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    rates: dict[str, list[float]] = {name: [] for name in readers}
    order, rng, share = list(readers), random.Random(seed), None
    say(f"{rounds} rounds of reading")
    for number in range(1 + rounds):
        rng.shuffle(order)
        for name in order:
            drop_pages(folder)
            share = resident_share(files)
            began = time.perf_counter()
            num_bytes = readers[name]()
            took = time.perf_counter() - began
            if number:  # the first round is not counted
                seconds[name].append(took)
                rates[name].append(num_bytes / took)
    return seconds, rates, share


# --- the filter


def _filter(folder: Path, options: BenchOptions) -> Result:
    num_living, num_absent = (2_000, 20_000) if options.quick else (50_000, 500_000)
    bits_per_key, fpr, num_rebuilds = churned_filter(num_living, num_absent)
    tier_row, saved = _churned_directory(folder, 100 if options.quick else 1_000)
    row: Row = {
        "part": f"the filter, every key exchanged {_CHURN} times",
        "keys": num_living,
        "bits_per_key": bits_per_key,
        "absent_that_pass": fpr,
        "of": num_absent,
        "rebuilds": num_rebuilds,
    }
    return [row, tier_row], {"bloom_fpr": fpr, "bloom_probes_saved": saved}


def churned_filter(num_living: int, num_absent: int) -> tuple[float, float, int]:
    """(bits for each living key at most, share of absent keys that pass, rebuilds) after the churn.

    The filter is made anew from the living keys when it says that it is worn, and at no other time.
    """
    say(f"a filter over {num_living:,} keys, each exchanged {_CHURN} times")
    living = [key_of(f"old/{number}") for number in range(num_living)]
    bloom = BloomFilter(num_living)
    bloom.add_many(living)
    rebuilds = 0
    for number in range(_CHURN * num_living):
        living[number % num_living] = key_of(f"new/{number}")
        bloom.add(living[number % num_living])
        if bloom.is_worn:
            bloom.rebuild(living)
            rebuilds += 1
    assert all(key in bloom for key in living), "a key that lies there is denied"
    passed = sum(key_of(f"absent/{number}") in bloom for number in range(num_absent))
    return bloom.num_bits / num_living, passed / num_absent, rebuilds


def _churned_directory(folder: Path, num_living: int) -> tuple[Row, float]:
    """A directory whose blocks were all exchanged, asked for as many texts again that it never had."""
    per_block = 2 * 4096 + 512  # a page for the header, one for the payload, and its share of the index
    chains = Chains(_CHURN * num_living // _CHAIN_BLOCKS, _CHAIN_BLOCKS, _SMALL_BYTES)
    tier = DiskTier(folder, DiskLimits(num_living * per_block + 2**20), chains.lineage)
    blocks = chains.blocks()
    while chain := list(islice(blocks, _CHAIN_BLOCKS)):
        assert tier.put(chain) == len(chain), "a chain that fits is not taken"
    before = tier.stats()
    assert before.evicted_blocks, "nothing had to go"
    for number in range(20 * num_living):
        key = key_of(f"absent/{number}")
        if tier.may_hold(key):
            assert tier.get([key]) == [], "a block that was never written"
    after = tier.stats()
    tier.close()
    ended, false = after.filter_saved - before.filter_saved, after.filter_false - before.filter_false
    row: Row = {
        "part": "lookups of texts that are not there, in a directory that was exchanged",
        "held_blocks": before.held_blocks,
        "evicted_blocks": before.evicted_blocks,
        "lookups": after.lookups - before.lookups,
        "ended_by_filter": ended,
        "asked_in_vain": false,
    }
    return row, ended / (ended + false)
