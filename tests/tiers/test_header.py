"""The header before a payload: its exact bytes, and that no damage passes for a header or for its payload."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ktransformer2.tiers.header import FORMAT_VERSION, HEADER_BYTES, BlockHeader
from ktransformer2.tiers.tier import ROOT
from tests.tiers.disk_factories import PAYLOAD_BYTES, block, digest, key_of, lineage, payload_of

MODEL = lineage()
FIRST = block("a0")
SECOND = block("a1", "a0")
HEADER = BlockHeader.describe(SECOND, MODEL, 1_700_000_000.9)


def test_every_field_lies_where_the_table_says() -> None:
    packed = HEADER.pack()
    assert len(packed) == HEADER_BYTES == 192
    assert packed[:8] == b"KT2BLOCK"
    assert struct.unpack_from("<HBBIQQ", packed, 8) == (FORMAT_VERSION, 3, 0, 64, PAYLOAD_BYTES, 1_700_000_000)
    assert packed[32:64] == MODEL.fingerprint
    assert packed[64:96] == MODEL.layouts[0]
    assert packed[96:129] == SECOND.key
    assert packed[129:162] == FIRST.key
    assert packed[162:178] == xxhash.xxh3_128_digest(SECOND.payload)
    assert packed[178:184] == bytes(6)
    assert packed[184:] == xxhash.xxh3_64_digest(packed[:184])


def test_a_header_survives_the_way_out_and_back() -> None:
    assert BlockHeader.unpack(HEADER.pack()) == HEADER
    assert BlockHeader.unpack(bytearray(HEADER.pack()) + b"payload") == HEADER


def test_a_first_block_has_no_parent_and_a_windowed_one_does_not_hold_its_own() -> None:
    windowed = lineage(payload_bytes=(PAYLOAD_BYTES, 500))
    first = BlockHeader.unpack(BlockHeader.describe(FIRST, MODEL, 0).pack())
    behind_window = BlockHeader.unpack(
        BlockHeader.describe(block("a1", "a0", group=1, num_bytes=500), windowed, 0).pack()
    )
    assert first is not None
    assert (first.parent, first.holds_parent, first.group) == (ROOT, True, 0)
    assert behind_window is not None
    assert (behind_window.parent, behind_window.holds_parent, behind_window.group) == (key_of("a0", 1), False, 1)


def test_a_clock_before_1970_is_1970() -> None:
    assert BlockHeader.describe(FIRST, MODEL, -5.0).written_s == 0


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_no_flipped_bit_passes_for_a_header(bit: int) -> None:
    packed = bytearray(HEADER.pack())
    packed[bit // 8] ^= 1 << bit % 8
    assert BlockHeader.unpack(packed) is None


@given(st.integers(0, HEADER_BYTES - 1))
def test_a_cut_header_is_none(length: int) -> None:
    assert BlockHeader.unpack(HEADER.pack()[:length]) is None


def test_another_version_is_none_even_when_its_checksum_fits() -> None:
    packed = bytearray(HEADER.pack())
    struct.pack_into("<H", packed, 8, FORMAT_VERSION + 1)
    packed[184:] = xxhash.xxh3_64_digest(bytes(packed[:184]))
    assert BlockHeader.unpack(packed) is None


def test_it_knows_its_block_by_key_fingerprint_layout_and_size() -> None:
    assert HEADER.is_of(MODEL, SECOND.key)
    assert not HEADER.is_of(MODEL, FIRST.key)
    assert not HEADER.is_of(lineage("another model"), SECOND.key)
    assert not HEADER.is_of(dataclasses.replace(MODEL, layouts=(digest("int4"),)), SECOND.key)
    assert not HEADER.is_of(dataclasses.replace(MODEL, payload_bytes=(PAYLOAD_BYTES + 1,)), SECOND.key)


@given(st.integers(0, PAYLOAD_BYTES * 8 - 1))
def test_it_vouches_for_no_damaged_payload(bit: int) -> None:
    damaged = bytearray(SECOND.payload)
    damaged[bit // 8] ^= 1 << bit % 8
    assert HEADER.vouches_for(SECOND.payload)
    assert not HEADER.vouches_for(damaged)
    assert not HEADER.vouches_for(damaged[:-1])


def test_a_payload_of_another_size_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="9999 bytes in layer group 0"):
        BlockHeader.describe(dataclasses.replace(SECOND, payload=payload_of(SECOND.key, PAYLOAD_BYTES - 1)), MODEL, 0.0)
