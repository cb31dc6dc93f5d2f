"""A Bloom filter over block keys: "surely not there" without I/O, "perhaps" for the rest. Knows no file and no tier.

A key is a SHA-256 digest and the number of a layer group. The digest is random already, so nothing is hashed here: the
seven probes are seven 32-bit words of it, mixed with the group and scaled to the number of bits.

Arithmetic: 7 probes, 12 bits a key. With n keys in m bits a share f = 1 - e^(-7n/m) of the bits is set, and a key that
is not there passes with f^7: 0.0033 when the filter was just built (f = 0.442). Keys cannot be taken out, so what was
deleted wears the filter, as growth does. The share of set bits is counted, not guessed, and `is_worn` says when f^7
has passed 0.008 (f = 0.502, 10.05 bits a key): after 19 % more keys than it was built for. Then the owner calls
`rebuild` with the keys that are left. So the rate stays below 0.01 at no more than 12 bits a living key, whatever the
churn, and a key is set again at most about six times (1 + 1 / 0.19) for each key that came.

Invariants: a key that was added since the last rebuild, or was given to it, is never denied.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import numpy as np

from ktransformer2.tiers.tier import KEY_BYTES

BITS_PER_KEY = 12
NUM_PROBES = 7
MAX_FPR = 0.008  # the promise is 0.01; a measurement scatters
LEAST_CAPACITY = 1024  # 1.5 kB
MOST_CAPACITY = 2**32 // BITS_PER_KEY  # a probe has 32 bits
_MIX = 0x9E3779B1  # 2^32 / golden ratio, made odd: groups that are near lie far apart
_WORDS = struct.Struct(f"<{NUM_PROBES}I")
_KEYS_AT_ONCE = 2**16  # 3.5 MB of probes


class BloomFilter:
    """One thread at a time adds and rebuilds; any thread may ask meanwhile.

    Why that is enough: bits are only ever set in place, each by a store of one byte, so a reader sees a key as soon as
    `add` has returned and never loses one; a rebuild works on an array of its own and puts it in place by one
    assignment, and a reader fetches the array once for all of its probes.
    """

    def __init__(self, capacity: int = LEAST_CAPACITY) -> None:
        self._bits = bytearray(_num_bytes(capacity))
        self._num_set = 0

    @property
    def num_bits(self) -> int:
        """Of the array: at most 12 for each key of the capacity."""
        return 8 * len(self._bits)

    @property
    def expected_fpr(self) -> float:
        """The share of absent keys that pass at present, from the share of bits that are set."""
        return (self._num_set / self.num_bits) ** NUM_PROBES

    @property
    def is_worn(self) -> bool:
        """Whether it is time to `rebuild`: growth or deleted keys have filled it past what was promised."""
        return self.expected_fpr > MAX_FPR

    def __contains__(self, key: bytes) -> bool:
        """False: surely not added."""
        bits = self._bits
        num_bits, mix = 8 * len(bits), key[-1] * _MIX & 0xFFFFFFFF
        for word in _WORDS.unpack_from(key):
            at = (word ^ mix) * num_bits >> 32
            if not bits[at >> 3] >> (at & 7) & 1:
                return False
        return True

    def add(self, key: bytes) -> None:
        """Set the bits of one key [KEY_BYTES]. One that is there already costs nothing of what the filter can hold."""
        bits = self._bits
        num_bits, mix = 8 * len(bits), key[-1] * _MIX & 0xFFFFFFFF
        for word in _WORDS.unpack_from(key):
            at = (word ^ mix) * num_bits >> 32
            self._num_set += not bits[at >> 3] >> (at & 7) & 1
            bits[at >> 3] |= 1 << (at & 7)

    def add_many(self, keys: Iterable[bytes]) -> None:
        """Set the bits of keys, a few microseconds each."""
        for key in keys:
            self.add(key)

    def rebuild(self, keys: Collection[bytes]) -> None:
        """Forget all but `keys`, and have room for as many."""
        num_bytes = _num_bytes(len(keys))
        flags = np.zeros(8 * num_bytes, np.bool_)  # one byte a bit, for the time of the rebuild
        left = iter(keys)
        while piece := list(islice(left, _KEYS_AT_ONCE)):
            flags[_probes(piece, len(flags))] = True
        bits = np.packbits(flags, bitorder="little")
        self._num_set = int(np.count_nonzero(flags))
        self._bits = bytearray(bits.tobytes())


def _num_bytes(capacity: int) -> int:
    """Of the bits for that many keys, rounded down: never more than 12 a key."""
    assert capacity <= MOST_CAPACITY, f"a filter for {capacity} keys, at most {MOST_CAPACITY}"
    return max(capacity, LEAST_CAPACITY) * BITS_PER_KEY // 8


def _probes(keys: Sequence[bytes], num_bits: int) -> np.ndarray:
    """The bits of every key, as `__contains__` finds them. [keys, NUM_PROBES] int64."""
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)
    words = np.ascontiguousarray(rows[:, : _WORDS.size]).view("<u4").astype(np.uint64)
    mixes = rows[:, -1:].astype(np.uint64) * np.uint64(_MIX) & np.uint64(0xFFFFFFFF)
    return ((words ^ mixes) * np.uint64(num_bits) >> np.uint64(32)).astype(np.int64)
