"""Extents of one size, cut from runs of the arena. Committed extent by extent, in the steps that the growth policy
names.

A slot of a run is in one of three states: **empty** (addresses only), **free** (committed, unused) or **used**.
`allocate` turns free into used and grows (empty into free) when the policy or need says so; `free` turns used into
free; `shrink`, `trim` and the arena's `give_back` turn free into empty. A run whose slots are all empty goes back to
the arena. Knows neither blocks nor sequences nor bytes inside an extent: an allocated extent holds whatever was there
before.

Invariants: the states of a run are disjoint bit masks; extents never overlap; an allocation fails only when neither
this pool, nor the limit, nor the free extents of other pools can give one extent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

from ktransformer2.layout import EXTENT_ALIGNMENT
from ktransformer2.memory.arena import SMALLEST_RUN_BYTES, Arena
from ktransformer2.memory.growth import GrowthPolicy, PoolUse
from ktransformer2.memory.run import Run, RunOccupancy, lowest_bit

# A run holds at least 8 extents, so that cutting a power of two into extents wastes at most 1/9 of the addresses, and a
# quarter of what the pool has already, so that a pool of n extents has O(log n) runs; at most 1,024, so that masks
# stay short.
_LEAST_EXTENTS_PER_RUN = 8
_MOST_EXTENTS_PER_RUN = 1024
_RUN_SHARE_OF_POOL = 4
_LEAST_RUNS_PER_ARENA = 32  # no run takes more of the addresses than this share


@dataclass
class SlabStats:
    """Counters of one pool. Tokens count what the extents can hold."""

    allocations: int = 0
    frees: int = 0
    refused_allocations: int = 0
    growth_events: int = 0
    grown_tokens: int = 0
    shrink_events: int = 0
    shrunk_tokens: int = 0
    reclaimed_extents: int = 0
    allocated_tokens: int = 0


class SlabPool:
    """Extents of `extent_bytes`, each holding `extent_tokens` tokens."""

    def __init__(self, arena: Arena, extent_bytes: int, extent_tokens: int, growth: GrowthPolicy) -> None:
        assert extent_bytes > 0, f"extent of {extent_bytes} bytes"
        assert extent_bytes % EXTENT_ALIGNMENT == 0, f"extent of {extent_bytes} bytes, not a multiple of a page"
        assert extent_tokens > 0, f"extent of {extent_tokens} tokens"
        self.extent_bytes = extent_bytes
        self.extent_tokens = extent_tokens
        self.num_used = 0
        self.num_free_committed = 0
        self.stats = SlabStats()
        self._arena = arena
        self._growth = growth
        self._runs: dict[int, Run] = {}
        self._bases: list[int] = []  # of all runs, sorted; the two below: of those with a free, an empty slot
        self._bases_with_free: list[int] = []
        self._bases_with_empty: list[int] = []
        self._run_address_bytes = 0
        self._growths_in_row = 0
        self._tokens_since_check = 0
        arena.register(self)

    # Levels

    @property
    def used_bytes(self) -> int:
        return self.num_used * self.extent_bytes

    @property
    def committed_bytes(self) -> int:
        return (self.num_used + self.num_free_committed) * self.extent_bytes

    @property
    def reclaimable_bytes(self) -> int:
        """What `give_back` and `trim` could return."""
        return self.num_free_committed * self.extent_bytes

    @property
    def num_runs(self) -> int:
        return len(self._bases)

    @property
    def fragmentation_ratio(self) -> float:
        """1 - longest stretch of unused slots / all unused slots, over the runs that hold a used extent.

        Unused means free or empty; a stretch ends at the end of its run. Runs without a used extent are whole already
        and do not count. 0: nothing could lie denser (or nothing is unused).
        """
        longest = total = 0
        for run in self._runs.values():
            if run.num_used:
                total += run.num_slots - run.num_used
                longest = max(longest, run.longest_unused())
        return 1 - longest / total if total else 0.0

    # Extents

    def allocate(self, near: int = 0) -> int | None:
        """The address of an extent, content undefined. None: no room anywhere, see the module.

        Takes the nearest free extent above `near` (an extent's address; right behind it is best), else the lowest.
        """
        if not self.reserve(1):
            self.stats.refused_allocations += 1
            return None
        run, slot = self._nearest_free(near)
        self._use(run, slot)
        return run.base + slot * self.extent_bytes

    def free(self, address: int) -> None:
        """Return an extent. It stays committed until a shrink, a trim, or until another pool of the arena is short."""
        run, slot = self._slot(address)
        assert run.used >> slot & 1, f"extent {address:#x} is not in use"
        was_listed = run.free != 0
        run.free |= 1 << slot
        run.num_used -= 1
        if not was_listed:
            self._list(run)
        self.num_used -= 1
        self.num_free_committed += 1
        self._tokens_since_check += self.extent_tokens
        self.stats.frees += 1

    def reserve(self, num_extents: int) -> bool:
        """Commit so much that `num_extents` allocations will succeed: one growth instead of many.

        False: no room for all. Room made elsewhere stays made; what this pool holds already is not touched.
        """
        wanted = self._growth.extents_to_commit(self._use_now(), num_extents)
        if not wanted:
            return True
        missing = max(0, num_extents - self.num_free_committed)
        if wanted * self.extent_bytes > self._arena.free_bytes:
            # The headroom does not fit. What is needed may be taken from others, headroom may not.
            if not self._arena.make_room(missing * self.extent_bytes, besides=self):
                return False
            wanted = missing
        if wanted:
            grown = self._grow(wanted)
            self.stats.growth_events += grown > 0
            self._arena.stats.growth_events += grown > 0
            self._growths_in_row += grown > 0
        return self.num_free_committed >= num_extents

    def take(self, address: int) -> bool:
        """Allocate the extent at this very address, which is not in use. False: it would have to be committed, and the
        limit leaves no room; other pools are not asked."""
        run, slot = self._slot(address)
        assert not run.used >> slot & 1, f"extent {address:#x} is in use"
        if run.empty >> slot & 1 and (self._arena.free_bytes < self.extent_bytes or not self._commit(run, slot, 1)):
            return False
        self._use(run, slot)
        return True

    # Giving memory back

    def shrink(self) -> int:
        """Give back what the growth policy finds too much, emptiest runs first. Returns bytes; mostly 0, at no cost."""
        count = self._growth.extents_to_give_back(self._use_now())
        if not count:
            # The next check waits for tokens again. A shrink leaves the count as it is: there may be more to give back.
            if self._tokens_since_check >= self._growth.config.shrink_check_tokens:
                self._tokens_since_check = 0
            return 0
        emptiest = sorted(self._bases_with_free, key=lambda base: (self._runs[base].num_used, -base))
        given = self._decommit(count, emptiest)
        self.stats.shrink_events += 1
        self.stats.shrunk_tokens += given * self.extent_tokens
        self._arena.stats.shrink_events += 1
        self._growths_in_row = 0
        return given * self.extent_bytes

    def trim(self) -> int:
        """Give back every free extent, and every run that is empty then. Returns bytes."""
        given = self._decommit(self.num_free_committed, self._bases_with_free[::-1])
        self.stats.shrink_events += given > 0
        self.stats.shrunk_tokens += given * self.extent_tokens
        self._arena.stats.shrink_events += given > 0
        self._growths_in_row = 0
        return given * self.extent_bytes

    def give_back(self, num_bytes: int) -> int:
        """For the arena: decommit free extents, highest first, until `num_bytes` are back or none is left."""
        left, given = -(-num_bytes // self.extent_bytes), 0
        while left > given and self._bases_with_free:
            given += self._decommit(left - given, [self._bases_with_free[-1]])
        self.stats.reclaimed_extents += given
        return given * self.extent_bytes

    def close(self) -> None:
        """Give everything back, used extents too, and leave the arena. The pool is empty afterwards."""
        for run in self._runs.values():
            run.free |= run.used
            run.num_used = 0
            self._list(run)
        self.num_free_committed += self.num_used
        self.num_used = 0
        self.trim()
        self._arena.unregister(self)

    # For the defragmenter

    def occupancy(self) -> list[RunOccupancy]:
        """Every run, by address."""
        return [RunOccupancy(base, run.num_slots, run.used) for base, run in sorted(self._runs.items())]

    def check_integrity(self) -> None:
        """Recounts every slot, list and run, and compares with what the arena holds."""
        used = free = addresses = 0
        for base, run in self._runs.items():
            everything = (1 << run.num_slots) - 1
            size = self._arena.run_bytes(base)
            addresses += size
            assert run.num_slots == size // self.extent_bytes, (
                f"run {base:#x} has {run.num_slots} slots in {size} bytes"
            )
            assert run.free & run.empty == 0, f"run {base:#x}: slots are both free and empty"
            assert (run.free | run.empty) & ~everything == 0, f"run {base:#x}: bits beyond its {run.num_slots} slots"
            assert run.empty != everything, f"run {base:#x} is empty and was not returned"
            assert run.num_used == run.used.bit_count(), f"run {base:#x}: {run.num_used} != {run.used.bit_count()} used"
            for slot in range(run.num_slots):
                committed = self._arena.is_committed(base + slot * self.extent_bytes, self.extent_bytes)
                assert committed == (not run.empty >> slot & 1), f"run {base:#x} slot {slot}: committed is {committed}"
            used += run.num_used
            free += run.free.bit_count()
        bases = sorted(self._runs)
        assert (used, free) == (self.num_used, self.num_free_committed), f"counted {used} used, {free} free"
        assert addresses == self._run_address_bytes, f"{addresses} != {self._run_address_bytes} bytes of addresses"
        assert bases == self._bases, "list of runs"
        assert [b for b in bases if self._runs[b].free] == self._bases_with_free, "list of runs with free slots"
        assert [b for b in bases if self._runs[b].empty] == self._bases_with_empty, "list of runs with empty slots"

    # Inside

    def _use_now(self) -> PoolUse:
        return PoolUse(
            self.num_used, self.num_free_committed, self.extent_tokens, self._growths_in_row, self._tokens_since_check
        )

    def _slot(self, address: int) -> tuple[Run, int]:
        i = bisect_right(self._bases, address) - 1
        assert i >= 0, f"{address:#x} is below every run of this pool"
        run = self._runs[self._bases[i]]
        slot, rest = divmod(address - run.base, self.extent_bytes)
        assert (slot < run.num_slots, rest) == (True, 0), f"{address:#x} is not an extent of this pool"
        return run, slot

    def _nearest_free(self, near: int) -> tuple[Run, int]:
        """The lowest free slot above `near`, else the lowest; there is one."""
        i = bisect_right(self._bases_with_free, near) - 1
        if i >= 0:
            run = self._runs[self._bases_with_free[i]]
            first = (near - run.base) // self.extent_bytes + 1
            if above := run.free >> first:
                return run, first + lowest_bit(above)
        run = self._runs[self._bases_with_free[(i + 1) % len(self._bases_with_free)]]
        return run, lowest_bit(run.free)

    def _use(self, run: Run, slot: int) -> None:
        run.free &= ~(1 << slot)
        run.num_used += 1
        if not run.free:
            self._list(run)
        self.num_used += 1
        self.num_free_committed -= 1
        self._tokens_since_check += self.extent_tokens
        self.stats.allocations += 1
        self.stats.allocated_tokens += self.extent_tokens

    def _grow(self, num_extents: int) -> int:
        """Commit empty slots, lowest first, in new runs when there are none. Returns how many."""
        left = num_extents
        while left and (self._bases_with_empty or self._add_run(left)):
            run = self._runs[self._bases_with_empty[0]]
            first = lowest_bit(run.empty)
            stretch = run.empty >> first
            count = min(left, lowest_bit(~stretch))
            if not self._commit(run, first, count):
                if not run.free and not run.num_used:
                    self._drop_run(run)
                break
            left -= count
        self.stats.grown_tokens += (num_extents - left) * self.extent_tokens
        return num_extents - left

    def _commit(self, run: Run, first: int, count: int) -> bool:
        if not self._arena.commit(run.base + first * self.extent_bytes, count * self.extent_bytes):
            return False
        mask = ((1 << count) - 1) << first
        run.empty &= ~mask
        run.free |= mask
        self.num_free_committed += count
        self._list(run)
        return True

    def _add_run(self, num_extents: int) -> bool:
        """Take a run for `num_extents` and more, or a smaller one. False: no addresses for a single extent."""
        extents = max(num_extents, _LEAST_EXTENTS_PER_RUN)
        wanted = max(extents * self.extent_bytes, self._run_address_bytes // _RUN_SHARE_OF_POOL, SMALLEST_RUN_BYTES)
        most = min(_MOST_EXTENTS_PER_RUN * self.extent_bytes, self._arena.stats.reserved_bytes // _LEAST_RUNS_PER_ARENA)
        size = 1 << (max(min(wanted, most), self.extent_bytes) - 1).bit_length()
        base = self._arena.allocate_run(size)
        while base is None and size // 2 >= self.extent_bytes:
            size //= 2
            base = self._arena.allocate_run(size)
        if base is None and self._arena.reclaim(self._arena.stats.limit_bytes, besides=self):
            base = self._arena.allocate_run(self.extent_bytes)  # others may have returned whole runs
        if base is None:
            return False
        size = self._arena.run_bytes(base)
        self._runs[base] = run = Run(base, size // self.extent_bytes)
        self._run_address_bytes += size
        insort(self._bases, base)
        self._list(run)
        return True

    def _decommit(self, count: int, bases: list[int]) -> int:
        """Empty up to `count` free slots of the runs `bases`, in that order, highest slot first. Returns how many."""
        left = count
        for base in bases:
            run = self._runs[base]
            while left and run.free:
                top = run.free.bit_length()
                stretch = top - (run.free ^ ((1 << top) - 1)).bit_length()  # ones at the top of the mask
                taken = min(left, stretch)
                self._arena.decommit(base + (top - taken) * self.extent_bytes, taken * self.extent_bytes)
                mask = ((1 << taken) - 1) << (top - taken)
                run.free &= ~mask
                run.empty |= mask
                left -= taken
            self._list(run)
            if not run.free and not run.num_used:
                self._drop_run(run)
            if not left:
                break
        self.num_free_committed -= count - left
        return count - left

    def _list(self, run: Run) -> None:
        """Bring the lists of runs up to date with the run's masks."""
        _keep(self._bases_with_free, run.base, bool(run.free))
        _keep(self._bases_with_empty, run.base, bool(run.empty))

    def _drop_run(self, run: Run) -> None:
        """Return a run whose slots are all empty to the arena."""
        for bases in (self._bases, self._bases_with_empty, self._bases_with_free):
            _keep(bases, run.base, False)
        del self._runs[run.base]
        self._run_address_bytes -= self._arena.run_bytes(run.base)
        self._arena.free_run(run.base)


def _keep(bases: list[int], base: int, wanted: bool) -> None:
    """Make a sorted list hold `base`, or not."""
    i = bisect_left(bases, base)
    if (i < len(bases) and bases[i] == base) == wanted:
        return
    if wanted:
        bases.insert(i, base)
    else:
        del bases[i]
