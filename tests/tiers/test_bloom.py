"""The filter denies nothing that it was given, and is wrong about the rest as seldom as it says."""

from __future__ import annotations

import random
import threading
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformer2.tiers.bloom import BITS_PER_KEY, LEAST_CAPACITY, MAX_FPR, BloomFilter

KEYS = st.binary(min_size=33, max_size=33)


def keys(first: int, last: int, group: int = 0) -> list[bytes]:
    """Keys as the cache makes them: a digest of something, and a layer group."""
    return [sha256(b"%d" % i).digest() + bytes([group]) for i in range(first, last)]


def fpr(bloom: BloomFilter, absent: list[bytes]) -> float:
    return sum(key in bloom for key in absent) / len(absent)


def test_a_new_filter_holds_nothing() -> None:
    bloom = BloomFilter()
    assert bloom.num_bits == LEAST_CAPACITY * BITS_PER_KEY
    assert (bloom.expected_fpr, bloom.is_worn) == (0.0, False)
    assert not any(key in bloom for key in keys(0, 1000))


@given(st.sets(KEYS, max_size=40), st.sets(KEYS, max_size=40), st.sets(KEYS, max_size=40))
def test_no_key_that_was_given_is_denied(built: set[bytes], single: set[bytes], many: set[bytes]) -> None:
    bloom = BloomFilter()
    bloom.rebuild(built)
    for key in single:
        bloom.add(key)
    bloom.add_many(many)
    assert all(key in bloom for key in built | single | many)
    again = BloomFilter()
    again.rebuild(built | single | many)  # vectorised there, one by one here: the same bits
    assert again._bits == bloom._bits
    assert again.expected_fpr == bloom.expected_fpr


@pytest.mark.parametrize("capacity", [1, LEAST_CAPACITY, 1025, 20_000, 20_001])
def test_it_takes_at_most_twelve_bits_a_key(capacity: int) -> None:
    wanted = max(capacity, LEAST_CAPACITY) * BITS_PER_KEY
    assert wanted - 8 < BloomFilter(capacity).num_bits <= wanted
    bloom = BloomFilter()
    bloom.rebuild(keys(0, capacity))
    assert wanted - 8 < bloom.num_bits <= wanted


def test_a_full_filter_is_wrong_once_in_three_hundred() -> None:
    bloom = BloomFilter()
    bloom.rebuild(keys(0, 20_000))
    assert bloom.expected_fpr == pytest.approx(0.0033, abs=0.0002)
    assert fpr(bloom, keys(100_000, 150_000)) == pytest.approx(bloom.expected_fpr, abs=0.001)


def test_it_is_worn_after_a_fifth_more_keys_and_still_keeps_its_promise() -> None:
    bloom = BloomFilter(20_000)
    for count, key in enumerate(keys(0, 40_000)):  # noqa: B007  the number is read after the loop
        if bloom.is_worn:
            break
        bloom.add(key)
    assert 1.17 < count / 20_000 < 1.21
    assert MAX_FPR < bloom.expected_fpr < 0.0081
    assert fpr(bloom, keys(100_000, 150_000)) <= 0.01


def test_a_key_that_is_there_wears_nothing() -> None:
    bloom = BloomFilter()
    bloom.add_many(keys(0, 500))
    before = bloom.expected_fpr
    bloom.add_many(keys(0, 500) * 3)
    assert bloom.expected_fpr == before


def test_the_rate_holds_through_tenfold_churn() -> None:
    """5,000 living keys, 50,000 replaced: rebuilt when worn, never more than 12 bits a living key."""
    chance, living, rebuilt, worst = random.Random(7), keys(0, 5_000), 0, 0.0
    bloom = BloomFilter()
    bloom.rebuild(living)
    absent = keys(1_000_000, 1_040_000)
    for number, key in enumerate(keys(5_000, 55_000)):
        living[chance.randrange(len(living))] = key
        bloom.add(key)
        if bloom.is_worn:
            if rebuilt % 4 == 0:
                worst = max(worst, fpr(bloom, absent))
            bloom.rebuild(living)
            rebuilt += 1
        if number % 5_000 == 0:
            assert all(key in bloom for key in living)
    assert all(key in bloom for key in living)
    assert bloom.num_bits / len(living) <= BITS_PER_KEY
    assert 50 <= rebuilt <= 56  # once for each 19 % that came
    assert 0.005 < worst <= 0.01
    assert fpr(bloom, absent) <= 0.01


def test_groups_of_one_prefix_are_told_apart() -> None:
    bloom = BloomFilter()
    bloom.rebuild(keys(0, 20_000, group=0))
    for group in (1, 2, 255):
        assert fpr(bloom, keys(0, 20_000, group)) <= 0.005


def test_readers_are_never_denied_while_a_writer_adds_and_rebuilds() -> None:
    bloom, added, done = BloomFilter(), keys(0, 3000), threading.Event()
    wrong: list[bytes] = []
    known = 0  # how many of `added` the writer has finished

    def read() -> None:
        while not done.is_set():
            until = known
            wrong.extend(key for key in added[:until] if key not in bloom)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number, key in enumerate(added):
        bloom.add(key)
        known = number + 1
        if number % 300 == 0:
            bloom.rebuild(added[:known])
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
