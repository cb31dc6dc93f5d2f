"""What is pinned in a directory stays when room is needed; a lower limit, `clear` and a broken file end it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_pins import PINS_NAME, Pin, have_room, pin_of, read_pins, write_pins
from ktransformer2.tiers.disk_store import DiskLimits
from tests.tiers.disk_factories import PAYLOAD_BYTES, RECORD_BYTES, Opener, chain, disk_bytes, key_of, lineage

MODEL = lineage()
INDEX_BYTES = 360_000
LIMITS = DiskLimits(40 * RECORD_BYTES + INDEX_BYTES)
PINNED = [key_of(f"a{i}") for i in range(5)]


def pin_the_first_chain(directory: Path, tier: DiskTier) -> None:
    """Its last block is named; the four before it stay with it."""
    assert tier.put(chain("a", 5)) == 5
    (last,) = (entry for entry in tier.entries() if entry.key == PINNED[-1])
    write_pins(directory, {pin_of(last)})


def fill(tier: DiskTier) -> None:
    """Much more than there is room for."""
    for number in range(30):
        tier.put(chain(f"other{number}-", 5))


@pytest.mark.parametrize("is_pinned", [False, True])
def test_what_is_pinned_makes_no_room_for_others(open_tier: Opener, tmp_path: Path, is_pinned: bool) -> None:
    tier = open_tier(tmp_path, LIMITS, MODEL)
    pin_the_first_chain(tmp_path, tier)
    if not is_pinned:
        write_pins(tmp_path, ())
        assert not (tmp_path / PINS_NAME).exists()
    fill(tier)
    assert len(tier.get(PINNED)) == (5 if is_pinned else 0)
    assert disk_bytes(tmp_path) <= LIMITS.limit_bytes
    assert tier.stats().failures == {}


def test_it_outlives_the_process_and_a_lost_index(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, LIMITS, MODEL)
    pin_the_first_chain(tmp_path, tier)
    tier.close()
    for file in tmp_path.glob("index*"):
        file.unlink()
    tier = open_tier(tmp_path, LIMITS, MODEL)
    fill(tier)
    assert len(tier.get(PINNED)) == 5


def test_a_limit_that_was_lowered_comes_before_a_pin(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, LIMITS, MODEL)
    pin_the_first_chain(tmp_path, tier)
    tier.close()
    lower = dataclasses.replace(LIMITS, limit_bytes=disk_bytes(tmp_path) - RECORD_BYTES)
    tier = open_tier(tmp_path, lower, MODEL)
    assert disk_bytes(tmp_path) <= lower.limit_bytes
    assert len(tier.get(PINNED)) < 5


def test_clear_takes_the_pins_too(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, LIMITS, MODEL)
    pin_the_first_chain(tmp_path, tier)
    tier.clear()
    assert read_pins(tmp_path) == set()


def test_lines_that_are_none_pin_nothing(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, LIMITS, MODEL)
    pin_the_first_chain(tmp_path, tier)
    file = tmp_path / PINS_NAME
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    (pin,) = read_pins(tmp_path)
    file.write_bytes(b"\xff\n" + file.read_bytes() + b"abc def\n" + b"0" * 64 + b" " + b"1" * 64 + b" 22\n")
    assert read_pins(tmp_path) == {pin}
    file.unlink()
    file.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        read_pins(tmp_path)


def test_half_of_the_limit_may_be_pinned_and_what_is_shared_counts_once(open_tier: Opener, tmp_path: Path) -> None:
    tier = open_tier(tmp_path, LIMITS, MODEL)
    tier.put(chain("a", 5))
    entries = tier.entries()
    pins = {pin_of(entry) for entry in entries}
    assert len(pins) == 5
    assert have_room(pins, entries, 2 * 5 * PAYLOAD_BYTES)
    assert not have_room(pins, entries, 2 * 5 * PAYLOAD_BYTES - 1)
    last = Pin(MODEL.fingerprint, MODEL.layouts[0], PINNED[-1])
    assert not have_room({last}, entries, 2 * 5 * PAYLOAD_BYTES - 1), "all before it count too"
    unknown = dataclasses.replace(last, key=key_of("gone"))
    assert have_room({unknown}, entries, 0)
