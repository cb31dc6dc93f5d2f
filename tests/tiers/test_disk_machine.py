"""The disk tier against a dict: any order of puts, gets, deletes, evictions, restarts and losses of the index."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits
from ktransformer2.tiers.tier import StoredBlock
from tests.tiers.disk_factories import RECORD_BYTES, block, disk_bytes, key_of, lineage, payload_of, remove

# A forest: three texts of four blocks, and a second end for each from its second block on.
PARENTS: dict[str, str | None] = {}
for text in "abc":
    PARENTS |= {f"{text}{i}": f"{text}{i - 1}" if i else None for i in range(4)}
    PARENTS |= {f"{text}x": f"{text}1", f"{text}y": f"{text}x"}
NAMES = st.lists(st.sampled_from(sorted(PARENTS)), min_size=1, max_size=5)
LIMIT_BYTES = 14 * RECORD_BYTES + 360_000  # fewer than all fit
LIMITS = DiskLimits(LIMIT_BYTES, segment_bytes=5 * RECORD_BYTES)
MODEL = lineage()


def stored(name: str) -> StoredBlock:
    return block(name, PARENTS[name])


def continuations(names: set[str], held: set[str]) -> set[str]:
    """The held blocks among `names`, and all held that continue them."""
    gone = names & held
    while more := {name for name in held if PARENTS[name] in gone} - gone:
        gone |= more
    return gone


class DiskAgainstDict(RuleBasedStateMachine):
    """The model: which blocks are held. What was evicted it learns from the tier, and checks that it may have been."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.tier = self.open()
        self.held: set[str] = set()

    def open(self) -> DiskTier:
        return DiskTier(self.directory, LIMITS, MODEL)

    def now_held(self) -> set[str]:
        names = {key_of(name): name for name in PARENTS}
        return {names[entry.key] for entry in self.tier.entries()}

    @rule(names=NAMES)
    def put(self, names: list[str]) -> None:
        before, evicted = set(self.held), self.tier.stats().evicted_blocks
        expected = set(before)
        for name in names:
            if PARENTS[name] is None or PARENTS[name] in expected:
                expected.add(name)
        count = self.tier.put([stored(name) for name in names])
        self.held = self.now_held()
        assert self.held <= expected
        assert count == len(self.held & set(names))
        if self.tier.stats().evicted_blocks == evicted:
            fitted = len(self.held - before)
            assert self.held == expected or fitted < len(expected - before), "left out though there was room"
            assert before <= self.held

    @rule(names=NAMES)
    def get(self, names: list[str]) -> None:
        expected = []
        for name in names:
            if name not in self.held:
                break
            expected.append(payload_of(key_of(name)))
        assert self.tier.get([key_of(name) for name in names]) == expected

    @rule(names=NAMES)
    def remove(self, names: list[str]) -> None:
        gone = continuations(set(names), self.held)
        remove(self.tier, [key_of(name) for name in names])
        self.held -= gone

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.open()

    @rule()
    def lose_the_index(self) -> None:
        """Under a running process: it notices at its next change."""
        for file in self.directory.glob("index*"):
            file.unlink()
        self.tier.gc()

    @rule()
    def break_the_index(self) -> None:
        """Between two processes: what is there is no index."""
        self.tier.close()
        for file in self.directory.glob("index*"):
            file.write_bytes(b"no index" * 700)
        self.tier = self.open()

    @rule()
    def tidy(self) -> None:
        self.tier.gc()

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.held = set()

    @invariant()
    def agrees(self) -> None:
        assert self.now_held() == self.held
        assert all(PARENTS[name] is None or PARENTS[name] in self.held for name in self.held)
        assert all(self.tier.may_hold(key_of(name)) for name in self.held)
        assert disk_bytes(self.directory) <= LIMIT_BYTES

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)


TestDiskAgainstDict = DiskAgainstDict.TestCase
TestDiskAgainstDict.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
