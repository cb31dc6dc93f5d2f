"""The system calls: what is touched is resident, what is released is gone and zero, on both kinds of system."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path

import pytest

from ktransformer2.errors import ConfigError, OutOfMemoryError
from ktransformer2.memory import mapping as mapping_module
from ktransformer2.memory.mapping import MappedFiles, Mapping, huge_page_bytes
from tests.memory.factories import MIB, PAGE


@pytest.mark.parametrize("linux", [True, False])
def test_released_memory_is_gone_and_reads_zero(linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not linux:  # the other branch uses calls that Linux has too
        monkeypatch.setattr(mapping_module, "_LINUX", False)
    mapping = Mapping(8 * MIB, 2 * MIB)
    assert mapping.start % (2 * MIB) == 0
    assert mapping.resident_bytes() == 0
    ctypes.memset(mapping.start, 7, MIB)
    assert mapping.resident_bytes() == MIB
    mapping.release(mapping.start, MIB // 2, cuts_huge_pages=False)
    assert mapping.resident_bytes() == MIB // 2
    assert ctypes.c_uint8.from_address(mapping.start).value == 0
    assert ctypes.c_uint8.from_address(mapping.start + MIB // 2).value == 7
    mapping.close()


def test_both_counts_of_resident_memory_agree() -> None:
    mapping = Mapping(8 * MIB, PAGE)
    for page in (0, 3, 4, 2047):
        ctypes.c_uint8.from_address(mapping.start + page * PAGE).value = 1
    assert mapping._resident_from_smaps() == mapping._resident_from_mincore() == 4 * PAGE
    mapping.close()


@pytest.mark.skipif(not huge_page_bytes(), reason="the system has no transparent huge pages")
def test_a_cut_through_a_huge_page_gives_its_part_back() -> None:
    unit = huge_page_bytes()
    mapping = Mapping(8 * unit, unit)
    assert mapping.advise_huge(mapping.start, 8 * unit)
    ctypes.memset(mapping.start, 7, 8 * unit)
    mapping.advise_small(mapping.start, unit)
    mapping.release(mapping.start, unit // 2, cuts_huge_pages=True)
    assert mapping.resident_bytes() == 8 * unit - unit // 2
    assert ctypes.c_uint8.from_address(mapping.start).value == 0
    assert ctypes.c_uint8.from_address(mapping.start + unit // 2).value == 7
    mapping.close()


def test_addresses_are_given_back_by_close_and_when_forgotten() -> None:
    def is_mapped(address: int) -> bool:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        spans = (tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines)
        return any(start <= address < stop for start, stop in spans)

    mapping = Mapping(2**40, PAGE)  # large enough that nothing else lands at the same place
    start = mapping.start
    assert is_mapped(start)
    mapping.close()
    mapping.close()
    assert not is_mapped(start)
    mapping = Mapping(2**40, PAGE)
    start = mapping.start
    del mapping
    gc.collect()
    assert not is_mapped(start)


def test_more_addresses_than_the_system_has_is_a_typed_error() -> None:
    with pytest.raises(OutOfMemoryError, match=r"refuses \d+ bytes of address space"):
        Mapping(2**60, PAGE)


@pytest.mark.parametrize("num_bytes", [0, -PAGE, 2**63, 2**64, 2**64 + PAGE])
def test_more_addresses_than_a_pointer_names_never_reach_the_system(num_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_bytes} bytes of addresses are not allowed; allowed: 1 to {2**63}"):
        Mapping(num_bytes, PAGE)


def test_no_huge_pages_where_the_system_does_not_name_a_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mapping_module, "_HUGE_SIZE_FILE", str(tmp_path / "missing"))
    assert huge_page_bytes() == 0


def test_whole_pages_of_a_file_are_forgotten_and_nothing_else(tmp_path: Path) -> None:
    page, forgotten = mmap.PAGESIZE, b"f" if sys.platform == "linux" else b"w"
    (tmp_path / "file").write_bytes(b"f" * 4 * page)
    with open(tmp_path / "file", "r+b") as file:
        of_file = mmap.mmap(file.fileno(), 4 * page, mmap.MAP_PRIVATE)
    of_none = mmap.mmap(-1, 4 * page)
    files = MappedFiles()
    for piece in (of_file, of_none):
        piece[:] = b"w" * 4 * page
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        files.forget(address + page // 2, 3 * page)  # pages 1 and 2 are whole
    assert of_file[:] == b"w" * page + forgotten * 2 * page + b"w" * page
    assert of_none[:] == b"w" * 4 * page
