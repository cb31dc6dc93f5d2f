"""Small policies and pools, and bytes in extents that say whose they are."""

from __future__ import annotations

import ctypes
from typing import Any

from ktransformer2.config import CacheConfig
from ktransformer2.memory import Arena, GrowthPolicy, SlabPool

PAGE = 4096
MIB = 2**20


def policy(**knobs: Any) -> GrowthPolicy:
    return GrowthPolicy(CacheConfig(**knobs))


def make_pool(arena: Arena, extent_bytes: int, extent_tokens: int = 64, **knobs: Any) -> SlabPool:
    return SlabPool(arena, extent_bytes, extent_tokens, policy(**knobs))


def allocate(pool: SlabPool, near: int = 0) -> int:
    """An extent that must be there."""
    address = pool.allocate(near)
    assert address is not None
    return address


def write(address: int, num_bytes: int, value: int) -> None:
    """A mark of 8 bytes at the first and at the last place of every page of an extent."""
    for at in range(address, address + num_bytes, PAGE):
        for place in (at, at + PAGE - 8):
            ctypes.c_uint64.from_address(place).value = value


def holds(address: int, num_bytes: int, value: int) -> bool:
    """Whether `write` with the same arguments is still to be read."""
    return all(
        ctypes.c_uint64.from_address(place).value == value
        for at in range(address, address + num_bytes, PAGE)
        for place in (at, at + PAGE - 8)
    )
