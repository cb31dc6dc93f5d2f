"""The second level in memory against a naive twin: a list of blocks that is searched from end to end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ktransformer2.errors import ConfigError
from ktransformer2.layout import round_up
from ktransformer2.tiers.host import HostTier
from ktransformer2.tiers.tier import ROOT, StoredBlock
from tests.tiers.disk_factories import PAYLOAD_BYTES, block, chain, digest, key_of, lineage

PAGE = 4096
EXTENT = 3 * PAGE  # what a payload of PAYLOAD_BYTES takes


def host(extents: int) -> HostTier:
    return HostTier(lineage(), extents * EXTENT)


def held(tier: HostTier, blocks: list[StoredBlock]) -> list[bool]:
    return [tier.may_hold(one.key) for one in blocks]


def test_what_was_put_comes_back_byte_for_byte() -> None:
    tier, blocks = host(4), chain("a", 3)
    assert tier.put(blocks) == 3
    found = tier.get([one.key for one in blocks])
    assert found == [one.payload for one in blocks]
    found[0][:] = bytes(PAYLOAD_BYTES)  # the copy is the receiver's
    assert tier.get([blocks[0].key]) == [blocks[0].payload]
    stats = tier.stats()
    assert (stats.held_blocks, stats.held_bytes, stats.limit_bytes) == (3, 3 * PAYLOAD_BYTES, 4 * EXTENT)
    assert (stats.stored_blocks, stats.stored_bytes) == (3, 3 * PAYLOAD_BYTES)
    assert (stats.loaded_blocks, stats.loaded_bytes) == (4, 4 * PAYLOAD_BYTES)
    assert (stats.transfers, stats.median_transfer_bytes, stats.failures) == (3, 3 * PAYLOAD_BYTES, {})


def test_a_chain_is_given_up_to_its_first_gap() -> None:
    tier, blocks = host(8), chain("a", 4)
    tier.put(blocks[:2])
    assert len(tier.get([one.key for one in blocks])) == 2
    assert tier.get([blocks[3].key, blocks[0].key]) == []


def test_a_block_without_its_parent_is_left_out() -> None:
    tier, blocks = host(8), chain("a", 4)
    assert tier.put(blocks[1:]) == 0
    assert tier.put([blocks[0], *blocks[2:]]) == 1
    assert held(tier, blocks) == [True, False, False, False]


def test_the_leaf_that_was_used_longest_ago_goes_first() -> None:
    tier, a, b = host(5), chain("a", 3), chain("b", 2)
    tier.put(a)
    tier.put(b)
    tier.get([one.key for one in a])
    assert tier.put([block("c")]) == 1
    assert held(tier, a + b) == [True, True, True, True, False]
    assert tier.put([block("d")]) == 1
    assert held(tier, a + b) == [True, True, True, False, False]
    assert tier.put([block("e"), block("f")]) == 2  # a was used before c and d came
    assert held(tier, [*a, block("c"), block("d")]) == [True, False, False, True, True]
    assert tier.stats().evicted_blocks == 4


def test_what_the_same_call_brought_is_no_victim() -> None:
    tier, blocks = host(3), chain("a", 5)
    assert tier.put(blocks) == 3
    assert held(tier, blocks) == [True, True, True, False, False]
    assert tier.put([blocks[3]]) == 0  # its own parent would have to go
    assert tier.put([block("b")]) == 1
    assert held(tier, blocks) == [True, True, False, False, False]


def test_blocks_with_a_window_do_without_the_one_before() -> None:
    sizes = (PAYLOAD_BYTES, 5000)
    tier = HostTier(lineage(payload_bytes=sizes), 2 * EXTENT)
    first, second = block("w0", group=1, num_bytes=5000), block("w1", "w0", group=1, num_bytes=5000)
    assert tier.put([second]) == 1
    assert tier.put([first]) == 1
    assert tier.get([first.key, second.key]) == [first.payload, second.payload]


def test_a_payload_of_another_shape_is_left_out_and_counted() -> None:
    tier, good = host(4), block("a")
    assert tier.put([replace(good, payload=b"short"), block("b", group=1)]) == 0
    assert tier.stats().failures == {"unfit": 2}
    assert HostTier(lineage(), PAGE).put([good]) == 0  # larger than the whole limit


def test_a_closed_tier_holds_nothing_and_raises_nothing() -> None:
    tier = host(4)
    tier.put(chain("a", 2))
    tier.close()
    tier.close()
    assert (tier.put(chain("a", 2)), tier.get([key_of("a0")])) == (0, [])
    assert not tier.may_hold(key_of("a0"))
    assert tier.stats().stored_blocks == 2


def test_a_limit_below_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit_bytes=4095"):
        HostTier(lineage(), 4095)


def test_readers_and_a_writer_share_it() -> None:
    tier, blocks = host(20), chain("a", 60)
    wrong: list[bytes] = []
    payloads = {one.key: one.payload for one in blocks}
    done = threading.Event()

    def read() -> None:
        keys = [one.key for one in blocks]
        while not done.is_set():
            for key, payload in zip(keys, tier.get(keys), strict=False):
                wrong.extend([key] if payload != payloads[key] else [])

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for round_ in range(10):
        tier.put(blocks)
        tier.put(chain(f"b{round_}", 10))
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    tier.check_integrity()


SIZES = (5000, 9000)  # two and three pages
LIMIT_PAGES = 14
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@dataclass
class Twin:
    """One block as the naive twin keeps it."""

    block: StoredBlock
    used: int


class HostMachine(RuleBasedStateMachine):
    """Small trees of prefixes in two layer groups, the second one with a window."""

    def __init__(self) -> None:
        super().__init__()
        self.lineage = lineage(payload_bytes=SIZES)
        self.tier = HostTier(self.lineage, LIMIT_PAGES * PAGE)
        self.twins: list[Twin] = []
        self.calls = 0

    def find(self, key: bytes) -> Twin | None:
        return next((twin for twin in self.twins if twin.block.key == key), None)

    def make(self, path: tuple[int, ...], group: int) -> StoredBlock:
        key = digest(repr(path)) + bytes([group])
        parent = digest(repr(path[:-1])) + bytes([group]) if path[:-1] else ROOT
        return StoredBlock(key, parent, 64, key * (SIZES[group] // 33) + bytes(SIZES[group] % 33), group == 0)

    def pages(self) -> int:
        return sum(round_up(len(twin.block.payload), PAGE) // PAGE for twin in self.twins)

    def is_leaf(self, twin: Twin) -> bool:
        return not any(one.block.parent == twin.block.key and one.block.holds_parent for one in self.twins)

    def model_put(self, block: StoredBlock) -> bool:
        if same := self.find(block.key):
            same.used = self.calls
            return True
        parent = self.find(block.parent)
        if block.holds_parent and block.parent != ROOT and parent is None:
            return False
        if parent:
            parent.used = self.calls
        while self.pages() + round_up(len(block.payload), PAGE) // PAGE > LIMIT_PAGES:
            leaves = [twin for twin in self.twins if self.is_leaf(twin) and twin.used < self.calls]
            if not leaves:
                return False
            self.twins.remove(min(leaves, key=lambda twin: (twin.used, twin.block.key)))
        self.twins.append(Twin(block, self.calls))
        return True

    @rule(paths=st.lists(PATHS, min_size=1, max_size=5), group=st.integers(0, 1))
    def put(self, paths: list[tuple[int, ...]], group: int) -> None:
        self.calls += 1
        blocks = [self.make(path, group) for path in paths]
        assert self.tier.put(blocks) == sum([self.model_put(block) for block in blocks])

    @rule(path=PATHS, group=st.integers(0, 1))
    def put_chain(self, path: tuple[int, ...], group: int) -> None:
        self.put([path[: length + 1] for length in range(len(path))], group)

    @rule(path=PATHS, first=st.integers(0, 3), group=st.integers(0, 1))
    def get(self, path: tuple[int, ...], first: int, group: int) -> None:
        self.calls += 1
        blocks = [self.make(path[: length + 1], group) for length in range(first, len(path))]
        expected = []
        for one in blocks:
            if not (twin := self.find(one.key)):
                break
            twin.used = self.calls
            expected.append(one.payload)
        assert self.tier.get([one.key for one in blocks]) == expected

    @invariant()
    def same(self) -> None:
        self.tier.check_integrity()
        stats = self.tier.stats()
        assert stats.held_blocks == len(self.twins)
        assert stats.held_bytes == sum(len(twin.block.payload) for twin in self.twins)
        assert all(self.tier.may_hold(twin.block.key) for twin in self.twins)

    def teardown(self) -> None:
        self.tier.close()


HostMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestHostMachine = HostMachine.TestCase
