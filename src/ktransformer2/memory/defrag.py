"""Plans moves that pack the used extents of a pool into as few runs as possible. Moves no byte and rewrites no table.

Runs are ordered from fullest to emptiest; two fingers walk towards each other: the first unused slot from the front
takes the last used extent from the back, until they meet. So every moved byte goes to its final place, whole runs
become free, and the emptiest first, also when the budget ends the plan early. Calling again goes on where it stopped.

Order costs nothing: which of the chosen extents goes to which of the chosen slots is free, so an extent goes right
behind its predecessor where that slot is chosen, and the rest keep the order of their addresses.

Invariants: a plan is empty when no move makes a pool denser; destinations are allocated when the plan is returned; no
address is both a source and a destination.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ktransformer2.memory.run import set_bits
from ktransformer2.memory.slab import SlabPool


@dataclass(frozen=True)
class Move:
    """One copy. Whoever carries it out frees `source` afterwards; whoever does not, frees `destination`."""

    source: int
    destination: int
    num_bytes: int


def plan_moves(pool: SlabPool, budget_bytes: int, chains: Iterable[Sequence[int]] = ()) -> list[Move]:
    """Moves of at most `budget_bytes` in all.

    `chains`: extents of this pool in the order in which a sequence reads them; used to put neighbours side by side.
    Side effect: every destination is allocated in `pool`. One that would need memory beyond the limit is left out.
    """
    sources, destinations = _choose(pool, budget_bytes // pool.extent_bytes)
    pairs = _match(sources, destinations, chains, pool.extent_bytes)
    return [Move(source, destination, pool.extent_bytes) for source, destination in sorted(pairs.items())]


def _choose(pool: SlabPool, most: int) -> tuple[list[int], list[int]]:
    """Equally many sources and destinations, both sorted; the destinations are allocated."""
    runs = sorted(pool.occupancy(), key=lambda run: (-run.used.bit_count() / run.num_slots, run.base))
    sources: list[int] = []
    destinations: list[int] = []
    used = _backwards([run.used for run in runs])
    place = next(used, None)
    for order, run in enumerate(runs):
        for slot in set_bits(run.unused):
            if place is None or (order, slot) >= place or len(sources) >= most:
                return sorted(sources), sorted(destinations)
            if pool.take(run.base + slot * pool.extent_bytes):
                destinations.append(run.base + slot * pool.extent_bytes)
                sources.append(runs[place[0]].base + place[1] * pool.extent_bytes)
                place = next(used, None)
    return sorted(sources), sorted(destinations)


def _backwards(used: list[int]) -> Iterator[tuple[int, int]]:
    """(run, slot) of every used slot, last run first, highest slot first."""
    for order in reversed(range(len(used))):
        mask = used[order]
        while mask:
            top = mask.bit_length() - 1
            yield order, top
            mask ^= 1 << top


def _match(
    sources: list[int], destinations: list[int], chains: Iterable[Sequence[int]], extent_bytes: int
) -> dict[int, int]:
    """Source -> destination: behind the predecessor where possible, the rest by address."""
    waiting, open_slots = set(sources), set(destinations)
    moved: dict[int, int] = {}
    for before, after in (pair for chain in chains for pair in pairwise(chain)):
        behind = moved.get(before, before) + extent_bytes
        if after in waiting and behind in open_slots and (before in moved or before not in waiting):
            moved[after] = behind
            waiting.remove(after)
            open_slots.remove(behind)
    moved.update(zip(sorted(waiting), sorted(open_slots), strict=True))
    return moved
