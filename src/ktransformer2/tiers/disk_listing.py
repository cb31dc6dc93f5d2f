"""What lies in a directory of the disk tier, by name: nothing is changed there, no lock is taken.

So a directory can be looked at while others write to it, and where nothing may be written. The index is asked; where
there is none that can be, the headers in the segments say the same, but for the uses: ages count from the writing then.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from ktransformer2.errors import ConfigError
from ktransformer2.tiers import segments
from ktransformer2.tiers.disk_directory import survey
from ktransformer2.tiers.disk_failures import said
from ktransformer2.tiers.disk_index import DiskIndex


@dataclass(frozen=True)
class HeldBlock:
    """One block as a list of what lies there shows it. `layout`: how its payload lies; see `Lineage`."""

    key: bytes
    parent: bytes
    holds_parent: bool
    num_tokens: int
    num_bytes: int
    age_s: float
    fingerprint: bytes
    layout: bytes


def look(directory: Path, now_s: float) -> list[HeldBlock]:
    """All that lies there, of every lineage, the newest use first. Raises: ConfigError where nobody may look."""
    try:
        found = survey(directory)
        for name in found.indexes:
            try:
                index = DiskIndex.look(directory / name)
            except sqlite3.Error:
                continue
            try:
                return indexed(index, now_s)
            except sqlite3.Error:
                continue  # somebody rebuilds it
            finally:
                index.close()
        return _read(directory, sorted(found.segments), now_s)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be looked at: {said(error)}") from error


def indexed(index: DiskIndex, now_s: float) -> list[HeldBlock]:
    """What an index says, the newest use first. Raises: sqlite3.Error."""
    rows = list(index.rows())  # before the lineages: an engine may add both meanwhile, the lineage first
    lineages = {number: lineage for lineage, number in index.lineages().items()}
    return [
        HeldBlock(
            *(row.key, row.parent, row.holds_parent, row.num_tokens, row.place.payload_bytes),
            max(0.0, now_s - row.used_s),
            *lineages[row.lineage],
        )
        for row in rows
    ]


def _read(directory: Path, numbers: list[int], now_s: float) -> list[HeldBlock]:
    """What the segments say, the newest first; of records that say the same, one. Raises: OSError."""
    found = {
        (header.fingerprint, header.layout, header.key): HeldBlock(
            *(header.key, header.parent, header.holds_parent, header.num_tokens, header.payload_bytes),
            max(0.0, now_s - header.written_s),
            *(header.fingerprint, header.layout),
        )
        for number in numbers
        for _, header in segments.scan(directory, number, 0)
    }
    return sorted(found.values(), key=lambda block: block.age_s)
