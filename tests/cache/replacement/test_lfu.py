"""LFU: who is least used, and that finding it costs no more however far ranks lie apart."""

from __future__ import annotations

from ktransformer2.cache.replacement.bands import Bands
from ktransformer2.cache.replacement.lfu import LFU
from ktransformer2.cache.replacement.policy import Entry, Queue
from ktransformer2.cache.replacement.retention import Retention


class CountedBuckets(dict[int, Queue]):
    """A dictionary that counts how often it is asked whether it has a key."""

    asked = 0

    def __contains__(self, key: object) -> bool:
        self.asked += 1
        return super().__contains__(key)


def test_the_least_used_goes_first_and_of_equals_the_oldest() -> None:
    retention = Retention(LFU(), lambda: 0.0)
    for key, uses in ((1, 2), (2, 1), (3, 1)):
        entry = retention.admit(key, None, 1)
        retention.release(entry)
        for _ in range(uses - 1):
            retention.use(entry)
            retention.release(entry)
    gone = []
    while (victim := retention.victim()) is not None:
        gone.append(victim.key)
        retention.evict(victim)
    assert gone == [2, 3, 1]


def test_an_old_rank_that_comes_back_costs_no_count_from_there() -> None:
    """A thousand hints run out one by one beside an entry that was used ten thousand times."""
    now = 0.0
    lfu = LFU()
    bands = Bands(lfu, lambda: now)
    retention = Retention(bands, lambda: now)
    old = [retention.admit(key, None, 1) for key in range(1000)]
    hot = retention.admit(-1, None, 1)
    for entry in (*old, hot):
        retention.release(entry)
    for _ in range(10_000):
        retention.use(hot)
        retention.release(hot)
    lfu._buckets = buckets = CountedBuckets(lfu._buckets)
    for number, entry in enumerate(old):
        bands.waiting([entry], ttl_s=number + 1.0)
    gone: list[Entry] = []
    for _ in range(len(old) + 1):
        now += 1.0
        while (victim := retention.victim()) is not hot:
            assert victim is not None
            gone.append(victim)
            retention.evict(victim)
    assert gone == old
    assert buckets.asked < 10 * len(old), f"{buckets.asked} looks for {len(old)} victims"
    retention.check_integrity()
