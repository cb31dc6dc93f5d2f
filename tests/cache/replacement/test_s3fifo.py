"""S3-FIFO's three queues on traces worked out by hand (algorithm 1 of the paper)."""

from __future__ import annotations

from ktransformer2.cache.replacement.s3fifo import _MAIN, _SMALL, S3FIFO
from tests.cache.replacement.keyed import Keyed


class Bed(Keyed):
    """Some keys under S3-FIFO."""

    def __init__(self, capacity: int) -> None:
        self.policy = S3FIFO()
        super().__init__(self.policy, capacity)

    def queues(self) -> tuple[list[object], ...]:
        """Small, main, ghosts, in keys, the next to go first."""
        small, main = self.policy._queues[_SMALL], self.policy._queues[_MAIN]
        return [e.key for e in small], [e.key for e in main], [*self.policy._ghosts]


def test_a_newcomer_leaves_the_small_queue_unused_or_used_once() -> None:
    bed = Bed(4)
    bed.touch(1, 2, 3, 4, 2)
    assert bed.queues() == ([1, 2, 3, 4], [], []), "a use moves nothing"
    bed.touch(5, 6)
    assert bed.queues() == ([3, 4, 5, 6], [], [1, 2]), "one use after the first is not enough"


def test_who_was_used_twice_moves_to_the_main_queue_and_begins_anew() -> None:
    bed = Bed(4)
    bed.touch(1, 2, 3, 4, 1, 1, 5)
    assert bed.queues() == ([3, 4, 5], [1], [2])
    assert bed.policy._frequency[bed.entry(1)] == 0


def test_a_remembered_key_goes_to_the_main_queue_at_once() -> None:
    bed = Bed(3)
    bed.touch(1, 2, 3, 4, 1)
    assert bed.queues() == ([3, 4], [1], [2])


def test_ghosts_are_no_more_than_the_cache_ever_held() -> None:
    bed = Bed(3)
    bed.touch(*range(8))
    assert bed.queues() == ([5, 6, 7], [], [2, 3, 4])


def test_the_main_queue_gives_a_turn_for_each_use_three_at_most_and_leaves_no_ghost() -> None:
    bed = Bed(20)
    bed.touch(*range(19), *[key for key in range(18) for _ in range(2)])  # 18 in 0..17 are used twice
    bed.touch(*range(100, 102))  # they pass to the main queue when room is needed for the second
    small, main, ghosts = bed.queues()
    assert (small, main, ghosts) == ([100, 101], [*range(18)], [18])
    bed.evict()
    assert bed.queues()[0] == [101], "two are a tenth of twenty"
    bed.touch(0, 0, 0, 0, 0, 1)
    assert bed.policy._frequency[bed.entry(0)] == 3, "five uses count as three"
    gone = [bed.evict() for _ in range(18)]
    assert gone == [*range(2, 18), 1, 0], "one in the small queue is less than a tenth: the main one gives"
    assert bed.queues() == ([101], [], [18, 100])


def test_who_is_in_use_keeps_its_place() -> None:
    bed = Bed(3)
    bed.touch(1, 2, 3)
    held = bed.entry(1)
    bed.retention.use(held)
    assert bed.evict() == 2, "1 is held"
    bed.retention.release(held)
    assert bed.queues() == ([1, 3], [], [2]), "in front, where it was"
