"""What lies in a directory of the disk tier, in one file and back: safetensors, written block by block.

    headers.<n>    [blocks, 192] uint8     what each block is, parents first (`header`)
    payloads.<n>   [blocks, bytes] uint8   in the order of the headers

A number stands for one lineage and layer group, whose payloads have one size. A payload is verified by its header when
it leaves and when it comes; one that is damaged is left out, with what continues it. A checksum finds damage, not
intent: whoever writes such a file decides what a model believes to have read. Knows no model and no text.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ktransformer2.errors import ConfigError
from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_listing import HeldBlock
from ktransformer2.tiers.disk_store import DiskLimits
from ktransformer2.tiers.header import FORMAT_VERSION, HEADER_BYTES, BlockHeader
from ktransformer2.tiers.tier import ROOT, Lineage, Payload, StoredBlock

_FORMAT = "ktransformer2 blocks"
_SLICE_BYTES = 8 * 2**20
_LENGTH_BYTES = 8
_ROOM_BYTES, _ROOM_BYTES_PER_KIND = 512, 256  # the file's own header is written last, into room left for it
_Kind = tuple[bytes, bytes, int, int]  # fingerprint, layout, layer group, payload bytes


@dataclass(frozen=True)
class Exchanged:
    """Blocks that were taken over, and the bytes of their payloads."""

    num_blocks: int
    num_bytes: int


# --- out


def export_blocks(place: Path, limits: DiskLimits, file: Path) -> Exchanged:
    """Write all blocks of a directory into a file that only its owner can read; it appears whole or not at all.

    Side effect: to read a block is a use of it. Raises: ConfigError for a directory that cannot be used; OSError.
    """
    with _opened(DiskTier(place, limits)) as tier:
        entries = tier.entries()
    kinds: dict[_Kind, list[HeldBlock]] = {}
    for each in entries:
        kinds.setdefault((each.fingerprint, each.layout, each.key[-1], each.num_bytes), []).append(each)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # 0600
    try:
        with os.fdopen(handle, "wb") as opened:
            done = _write(place, limits, kinds, opened)
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return done


def _write(place: Path, limits: DiskLimits, kinds: dict[_Kind, list[HeldBlock]], file: Any) -> Exchanged:
    room = _ROOM_BYTES + _ROOM_BYTES_PER_KIND * len(kinds)
    file.write(bytes(_LENGTH_BYTES + room))
    contents: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "version": str(FORMAT_VERSION)}}
    num_blocks = num_bytes = end = 0
    for number, (kind, blocks) in enumerate(kinds.items()):
        lineage, packed = _lineage(kind), bytearray()
        with _opened(DiskTier(place, limits, lineage)) as tier:
            for block, payload in _whole(_parents_first(blocks), kind[-1], tier.get):
                stored = StoredBlock(block.key, block.parent, block.num_tokens, payload, block.holds_parent)
                packed += BlockHeader.describe(stored, lineage, time.time()).pack()
                file.write(payload)
        count = len(packed) // HEADER_BYTES
        file.write(packed)
        for name, size in (("payloads", kind[-1]), ("headers", HEADER_BYTES)):
            begin, end = end, end + count * size
            contents[f"{name}.{number}"] = {"dtype": "U8", "shape": [count, size], "data_offsets": [begin, end]}
        num_blocks, num_bytes = num_blocks + count, num_bytes + count * kind[-1]
    head = json.dumps(contents).encode()
    assert len(head) <= room, f"a header of {len(head)} bytes for {len(kinds)} kinds"
    file.seek(0)
    file.write(room.to_bytes(_LENGTH_BYTES, "little") + head.ljust(room))
    return Exchanged(num_blocks, num_bytes)


def _whole(
    blocks: Sequence[HeldBlock], size: int, get: Callable[[Sequence[bytes]], Sequence[Payload]]
) -> Iterator[tuple[HeldBlock, Payload]]:
    """Blocks with their payloads, but for those that cannot be read and those whose parent was left out."""
    gone: set[bytes] = set()
    at, at_once = 0, max(1, _SLICE_BYTES // size)
    while at < len(blocks):
        part = blocks[at : at + at_once]
        payloads = get([block.key for block in part])
        for block, payload in zip(part, payloads, strict=False):
            if block.holds_parent and block.parent in gone:
                gone.add(block.key)
            else:
                yield block, payload
        if len(payloads) < len(part):
            gone.add(part[len(payloads)].key)
        at += min(len(payloads) + 1, len(part))


def _parents_first(blocks: Sequence[HeldBlock]) -> list[HeldBlock]:
    """Chain by chain, as they mostly lie on the disk. A block whose parent has left is a beginning."""
    there = {block.key for block in blocks}
    children: dict[bytes, list[HeldBlock]] = {}
    for block in blocks:
        children.setdefault(block.parent if block.parent in there else ROOT, []).append(block)
    ordered: list[HeldBlock] = []
    waiting = children.pop(ROOT, [])
    while waiting:
        block = waiting.pop()
        ordered.append(block)
        waiting += children.pop(block.key, [])
    return ordered


# --- in


def import_blocks(place: Path, limits: DiskLimits, file: Path) -> Exchanged:
    """Keep the blocks of a file in a directory; what lies there already counts too.

    Raises: ConfigError for a file that `export_blocks` did not write, before anything is kept or made.
    """
    try:
        opened: Any = safe_open(file, "numpy")
        about = opened.metadata() or {}
        if (about.get("format"), about.get("version")) != (_FORMAT, str(FORMAT_VERSION)):
            raise ConfigError(f"{file} cannot be imported: it holds no blocks of format {FORMAT_VERSION}")
        numbers = range(sum(name.startswith("headers.") for name in opened.keys()))  # noqa: SIM118  # no mapping
        headers = [_headers(opened, number) for number in numbers]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be imported: {error}; write one with `ktransformer cache export`") from error
    num_blocks = num_bytes = 0
    for number, found in enumerate(headers):
        first = next((header for header in found if header is not None), None)
        if first is None:
            continue
        lineage = _lineage((first.fingerprint, first.layout, first.group, first.payload_bytes))
        with _opened(DiskTier(place, limits, lineage)) as tier:
            for batch in _batches(_verified(opened, number, found, lineage)):
                held = tier.put(batch)
                num_blocks, num_bytes = num_blocks + held, num_bytes + held * first.payload_bytes
    return Exchanged(num_blocks, num_bytes)


def _headers(opened: Any, number: int) -> list[BlockHeader | None]:
    """Raises: SafetensorError where headers and payloads do not go together."""
    rows, payloads = opened.get_tensor(f"headers.{number}"), opened.get_slice(f"payloads.{number}")
    shape = payloads.get_shape()
    if str(rows.dtype) != "uint8" or payloads.get_dtype() != "U8" or len(shape) != 2 or shape[0] != len(rows):
        raise SafetensorError(f"headers.{number} and payloads.{number} do not go together")
    return [BlockHeader.unpack(row.tobytes()) for row in rows]


def _verified(
    opened: Any, number: int, headers: Sequence[BlockHeader | None], lineage: Lineage
) -> Iterator[StoredBlock]:
    """The blocks whose header and payload are whole. One whose parent is not there the tier leaves out by itself."""
    payloads = opened.get_slice(f"payloads.{number}")
    for row, header in enumerate(headers):
        if header is None or not header.is_of(lineage, header.key):
            continue
        payload = payloads[row].tobytes()
        if header.vouches_for(payload):
            yield StoredBlock(header.key, header.parent, header.num_tokens, payload, header.holds_parent)


def _batches(blocks: Iterable[StoredBlock]) -> Iterator[list[StoredBlock]]:
    batch: list[StoredBlock] = []
    for block in blocks:
        batch.append(block)
        if len(batch) * len(block.payload) >= _SLICE_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


# --- both


def _lineage(kind: _Kind) -> Lineage:
    """As far as one layer group goes; the ones before it are left empty."""
    fingerprint, layout, group, size = kind
    return Lineage(fingerprint, (*[b""] * group, layout), (*[0] * group, size))


@contextlib.contextmanager
def _opened(tier: DiskTier) -> Iterator[DiskTier]:
    """Raises: ConfigError where the directory cannot be used."""
    try:
        if tier.off_reason is not None:
            raise ConfigError(tier.off_reason)
        yield tier
    finally:
        tier.close()
