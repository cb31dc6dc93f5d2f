"""The door to the kernels: cheap checks of the arguments, then the fastest backend that this machine can run.

Backends: `avx512`, `avx2`, `portable` (native, where the extension was built) and `reference` (torch, always there).
KTRANSFORMER_KERNELS forces one. Knows no block's life; the batch says where everything is.
Invariant: every backend has the same signatures and the same semantics, those of `batch.KVBatch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ktransformer2.errors import ConfigError
from ktransformer2.kernels import reference
from ktransformer2.kernels.batch import BATCH_DTYPES, AttentionParams, KVBatch
from ktransformer2.kernels.pages import FORMS

ENVIRONMENT_VARIABLE = "KTRANSFORMER_KERNELS"
BACKENDS = ("avx512", "avx2", "portable", "reference")  # fastest first

_forced: str | None = None  # by `use_backend`
_batch_seen: weakref.ref[KVBatch] | None = None  # whose tensors were checked last


@cache
def available_backends() -> tuple[str, ...]:
    """The backends that this machine and this installation can run, fastest first; `reference` is always the last."""
    native = () if _native() is None else _native().available_targets()
    return tuple(name for name in BACKENDS if name == "reference" or name in native)


def backend_name() -> str:
    """The backend that the next call takes. Raises ConfigError where the environment names one that cannot run."""
    if _forced is not None:
        return _forced
    return _wanted_backend(os.environ.get(ENVIRONMENT_VARIABLE, ""))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Forces a backend for everything inside the `with`; process-wide, so for tests and benchmarks only."""
    global _forced
    before, _forced = _forced, _checked(name, f"backend {name!r}")
    try:
        yield
    finally:
        _forced = before


@contextmanager
def without_prefetch() -> Iterator[None]:
    """Native kernels call for no page ahead inside the `with`: to measure what it is worth. Process-wide."""
    if _native() is None:
        yield
        return
    _native().select_prefetch(False)
    try:
        yield
    finally:
        _native().select_prefetch(True)


def store_kv(k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int) -> None:
    """Writes the step's rows k [T, G, Dk] and v [T, G, Dv] where layer `column` keeps them as computed.

    Side effects: a row goes to its block's open page, else to the block's page-table page if both its forms are full,
    else nowhere (the block becomes full in this step, and `seal` takes the row from k and v).
    """
    check_rows(k, v, batch, column)
    backend().store_kv(k, v, batch, column)


def seal(k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int) -> None:
    """Writes the sealed form of every block that becomes full in this step into its page of layer `column`.

    Side effects: writes the pages of `batch.seals`, from k and v or from the open page. Call after `store_kv`.
    """
    check_rows(k, v, batch, column)
    backend().seal(k, v, batch, column)


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int, params: AttentionParams
) -> torch.Tensor:
    """Attention of q [T, H, Dk] over what each query sees in layer `column`: [T, H, Dv] in q's dtype, summed in fp32.

    A query reads its own block-table entry as computed and earlier entries in their sealed form. Call after `seal`.
    """
    check_rows(k, v, batch, column)
    _check_queries(q, k, batch, params)
    out: torch.Tensor = backend().paged_attention(q, k, v, batch, column, params)
    return out


@cache
def _native() -> Any:
    """The binding of the C++ kernels; None where the package was installed without a compiler."""
    if importlib.util.find_spec("ktransformer2._native") is None:
        return None
    return importlib.import_module("ktransformer2.kernels.cpu")


def backend() -> Any:
    """The module whose functions the next call takes."""
    name = backend_name()
    if name == "reference":
        return reference
    _native().select_target(name)
    return _native()


@cache
def _wanted_backend(wanted: str) -> str:
    return _checked(wanted, f"{ENVIRONMENT_VARIABLE}={wanted!r}") if wanted else available_backends()[0]


def _checked(name: str, what: str) -> str:
    if name not in BACKENDS:
        raise ConfigError(f"{what} is unknown; known: {', '.join(BACKENDS)}")
    if name not in available_backends():
        raise ConfigError(f"{what} cannot run here; on this machine: {', '.join(available_backends())}")
    return name


def check_rows(k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int) -> None:
    """Programmer errors, found before a raw address is written: shapes and dtypes only, values are the cache's duty."""
    group, tokens = batch.group, batch.slot_mapping.shape[0]
    want_k, want_v = (tokens, group.num_kv_heads, group.k_head_size), (tokens, group.num_kv_heads, group.v_head_size)
    assert k.shape == want_k, f"k has shape {tuple(k.shape)}, the batch wants {want_k}"
    assert v.shape == want_v, f"v has shape {tuple(v.shape)}, the batch wants {want_v}"
    assert k.dtype in FORMS, f"k is {k.dtype}; rows come in {', '.join(map(str, FORMS))}"
    assert k.dtype == v.dtype, f"k is {k.dtype}, v is {v.dtype}"
    assert k.stride(-1) == 1, f"k's channels are {k.stride(-1)} elements apart, not 1"
    assert v.stride(-1) == 1, f"v's channels are {v.stride(-1)} elements apart, not 1"
    num_layers = batch.page_table.shape[1]
    assert 0 <= column < num_layers, f"column {column} of a page table with {num_layers}"
    if _batch_seen is None or _batch_seen() is not batch:
        _check_batch(batch)


def _check_batch(batch: KVBatch) -> None:
    """Once per batch, not per layer: a decode step is short."""
    global _batch_seen
    for name, dtype in BATCH_DTYPES.items():
        tensor: torch.Tensor = getattr(batch, name)
        assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
        assert tensor.is_contiguous(), f"{name} is not contiguous, its strides are {tensor.stride()}"
    assert batch.page_table.shape == batch.open_table.shape, (
        f"page_table has shape {tuple(batch.page_table.shape)}, open_table {tuple(batch.open_table.shape)}"
    )
    _batch_seen = weakref.ref(batch)


def _check_queries(q: torch.Tensor, k: torch.Tensor, batch: KVBatch, params: AttentionParams) -> None:
    tokens, num_heads, size = q.shape
    g = batch.group.num_kv_heads
    assert (tokens, size) == (k.shape[0], k.shape[2]), f"q has shape {tuple(q.shape)}, k has {tuple(k.shape)}"
    assert num_heads % g == 0, f"{num_heads} query heads do not divide over {g} KV heads"
    assert q.dtype == k.dtype, f"q is {q.dtype}, k is {k.dtype}"
    assert q.stride(-1) == 1, f"q's channels are {q.stride(-1)} elements apart, not 1"
    if params.sinks is not None:
        assert params.sinks.shape == (num_heads,), f"sinks have shape {tuple(params.sinks.shape)}, not ({num_heads},)"
    if params.rope is not None:
        assert params.rope.rotary_size <= size, f"{params.rope.rotary_size} rotated channels in a head of {size}"
    assert params.window is None or params.window > 0, f"a window of {params.window} tokens"
