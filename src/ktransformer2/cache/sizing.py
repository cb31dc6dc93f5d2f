"""What sequences take in a cache, from a model's geometry and the settings alone. Pure: no arena, no tensor.

`KVCache`, admission and `plan` all ask here: what a plan promises before a model is loaded, is admitted after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ktransformer2.cache.block import table_bytes
from ktransformer2.config import CacheConfig
from ktransformer2.layout import ExtentLayout, Form, LayerGroup, ModelGeometry

_FIRST_TABLE_ROWS = 64
_ENTRY_BYTES = 8  # of a page table: an address with two forms


@dataclass(frozen=True)
class Demand:
    """`num_sequences` texts of `num_tokens` each, read in steps of at most `chunk_tokens` (0: all rows are there)."""

    num_tokens: int
    chunk_tokens: int = 0
    num_sequences: int = 1


@dataclass(frozen=True)
class DemandBytes:
    """What a demand takes at most: K and V with their scales, and the tables that say where they are."""

    kv_bytes: int
    table_bytes: int

    @property
    def total(self) -> int:
        return self.kv_bytes + self.table_bytes


def sealed_form(geometry: ModelGeometry, config: CacheConfig) -> Form:
    """The form of full blocks."""
    return geometry.full_form if config.kv == "full" else Form.INT8


def page_table_rows(num_blocks: int) -> int:
    """Rows of a page table that holds `num_blocks`: tables double from their first size."""
    rows = _FIRST_TABLE_ROWS
    while rows < num_blocks:
        rows *= 2
    return rows


def page_table_bytes(group: LayerGroup, num_rows: int) -> int:
    """Page table and open table of one layer group."""
    return 2 * num_rows * len(group.layers) * _ENTRY_BYTES


def demand_bytes(
    geometry: ModelGeometry, config: CacheConfig, demand: Demand, page_tables: Sequence[int] = ()
) -> DemandBytes:
    """The most bytes that `demand` needs, filling blocks and tables included.

    `page_tables`: bytes that the page tables of every group have already; they do not shrink for a demand.
    """
    size, num_sequences, sealed = config.block_tokens, demand.num_sequences, sealed_form(geometry, config)
    num_open = 1
    if sealed != geometry.full_form:  # a chunk may begin in one filling block and end in another
        num_open += (demand.chunk_tokens > 0) - (-config.max_rollback_tokens // size)
    kv, tables = 0, num_sequences * table_bytes(demand.num_tokens, size, len(geometry.groups))
    for group, present in zip(geometry.groups, page_tables or (0,) * len(geometry.groups), strict=True):
        held = _held_tokens(group, demand, size) // size
        filling = num_open * _extent_bytes(group, size, geometry.full_form)
        kv += num_sequences * (held * _extent_bytes(group, size, sealed) + filling)
        tables += max(present, page_table_bytes(group, page_table_rows(num_sequences * (held + 2))))
    return DemandBytes(kv, tables)


@lru_cache(maxsize=256)
def _extent_bytes(group: LayerGroup, block_tokens: int, form: Form) -> int:
    return ExtentLayout.uniform(group, block_tokens, form).extent_bytes


def _held_tokens(group: LayerGroup, demand: Demand, block_tokens: int) -> int:
    """Tokens that one sequence holds at once in full blocks: a windowed group keeps a step's rows whole before the
    window passes them. Two blocks of slack: the window and the step may both begin inside one.
    """
    if group.window is None:
        return demand.num_tokens
    return min(demand.num_tokens, group.window + demand.chunk_tokens + 2 * block_tokens)


def longest_tokens(
    geometry: ModelGeometry, config: CacheConfig, demand: Demand, page_tables: Sequence[int] = ()
) -> int:
    """The longest text, all of `demand` else the same, that `config.memory_bytes` holds. 0: none.

    The model's own context length is not looked at.
    """
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        longer = Demand(middle, demand.chunk_tokens, demand.num_sequences)
        fits = demand_bytes(geometry, config, longer, page_tables).total <= config.memory_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
