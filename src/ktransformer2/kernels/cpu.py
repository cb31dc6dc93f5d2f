"""The binding of the C++ kernels: addresses and strides out, nothing copied. Importable only where they were built.

Checks what a wrong address would follow from and what `attention` does not: the batch's tensors lie on the CPU, are
contiguous and of the dtypes of `batch.KVBatch`. A batch that contradicts itself raises ValueError.

Invariants: torch is imported before the extension, so that both use the OpenMP runtime torch brought along; a call
uses as many threads as torch does; results depend on the instruction set, never on the number of threads.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ktransformer2 import _native
from ktransformer2.errors import ConfigError
from ktransformer2.kernels.batch import BATCH_DTYPES, AttentionParams, KVBatch
from ktransformer2.kernels.pages import FORMS

if TYPE_CHECKING:
    from ktransformer2.kernels.decoder import HeadNorms, Rotation

_targets = tuple(_native.isa_names())
_target = _targets[0]
_prefetch = True
_batches: dict[int, tuple[weakref.ref[KVBatch], _native.Batch]] = {}  # by id; gone with the batch


def available_targets() -> tuple[str, ...]:
    """The instruction sets this processor can run, best first: of `avx512`, `avx2`, `portable`."""
    return _targets


def select_target(name: str) -> None:
    """Side effect: process-wide. Raises ConfigError where the processor cannot run it."""
    global _target
    if name not in _targets:
        raise ConfigError(f"kernels {name!r} cannot run on this processor; allowed: {', '.join(_targets)}")
    _target = name


def select_prefetch(on: bool) -> None:
    """Whether attention calls for the next page while it works on one. Side effect: process-wide; changes no result."""
    global _prefetch
    _prefetch = on


def store_kv(k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int) -> None:
    """See `attention.store_kv`."""
    _native.store_kv(_native_batch(batch), column, _rows(k), _rows(v), FORMS[k.dtype], torch.get_num_threads())


def seal(k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int) -> None:
    """See `attention.seal`."""
    if batch.seals.shape[0] == 0:
        return
    threads = torch.get_num_threads()
    _native.seal(_target, _native_batch(batch), column, _rows(k), _rows(v), FORMS[k.dtype], threads)


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: KVBatch, column: int, params: AttentionParams
) -> torch.Tensor:
    """See `attention.paged_attention`. A row's result depends on nothing but what it reads: not on batch or threads."""
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    sinks = None if params.sinks is None else params.sinks.to(torch.float32).contiguous()
    _native.paged_attention(
        _target,
        _native_batch(batch),
        column,
        (_rows(k), _rows(v)),
        (_rows(q), _rows(out)),
        (FORMS[q.dtype], q.shape[1], torch.get_num_threads(), _prefetch),
        (params.scale, params.window or 0, params.softcap or 0.0, 0 if sinks is None else sinks.data_ptr()),
        params.rope,
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """See `decoder.rms_norm`."""
    out = torch.empty_like(x)
    addresses = x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr()
    rows, size = x.shape
    _native.norm_rows(_target, addresses, rows, size, FORMS[x.dtype], eps, torch.get_num_threads())
    return out


def rotate_and_store(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: KVBatch,
    column: int,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> None:
    """See `decoder.rotate_and_store`."""
    q, k, v = qkv
    cosines, sines = rotation.cosines.contiguous(), rotation.sines.contiguous()
    _native.rotate_and_store(
        _target,
        _native_batch(batch),
        column,
        (_rows(q), _rows(k), _rows(v)),
        (FORMS[q.dtype], q.shape[1], torch.get_num_threads()),
        (cosines.data_ptr(), sines.data_ptr(), cosines.shape[1]),
        (0, 0, 0.0) if norms is None else (norms.q_weight.data_ptr(), norms.k_weight.data_ptr(), norms.eps),
    )


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `decoder.silu_multiply`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    threads = torch.get_num_threads()
    _native.gate_rows(_target, gate_up.data_ptr(), out.data_ptr(), rows, size, FORMS[gate_up.dtype], threads)
    return out


def packed_matrix(
    tiles: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, num_inputs: int, int4: bool
) -> _native.PackedMatrix:
    """The addresses of a `linear.PackedMatrix`, whose tensors must outlive them."""
    assert tiles.data_ptr() % 4 == 0, f"tiles lie at {tiles.data_ptr():#x}"
    return _native.PackedMatrix(tiles.data_ptr(), 0 if bias is None else bias.data_ptr(), num_outputs, num_inputs, int4)


def multiply_packed(matrix: _native.PackedMatrix, x: torch.Tensor, out: torch.Tensor) -> None:
    """See `linear.multiply`. Side effect: writes `out`."""
    _native.multiply_packed(_target, matrix, _matrix(x), _matrix(out), x.shape[0], torch.get_num_threads())


def multiply_dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See `linear.multiply_dense`; x is fp32. Side effect: writes `out`."""
    assert x.dtype == torch.float32, f"x is {x.dtype}"
    assert x.shape[1] == weight.shape[1], f"x has {x.shape[1]} inputs, the weights {weight.shape[1]}"
    assert weight.is_contiguous(), f"the weights are not contiguous, their strides are {weight.stride()}"
    if bias is not None:
        assert bias.dtype == torch.float32, f"bias is {bias.dtype}"
        assert bias.shape == (weight.shape[0],), f"bias has shape {tuple(bias.shape)}, weights {tuple(weight.shape)}"
        assert bias.is_contiguous(), f"bias is not contiguous, its stride is {bias.stride()}"
    numbers, sizes = 0 if bias is None else bias.data_ptr(), (*x.shape, out.shape[1])
    threads = torch.get_num_threads()
    _native.multiply_dense(_target, _matrix(weight), numbers, _matrix(x), _matrix(out), sizes, threads)


def read_bandwidth(num_bytes: int, num_threads: int, rounds: int = 5) -> float:
    """Bytes per second at which the kernels' threads can read memory: the median of `rounds` passes."""
    return _native.read_bandwidth(num_bytes, num_threads, rounds)


def _rows(x: torch.Tensor) -> tuple[int, int, int]:
    token_stride, head_stride, _ = x.stride()
    return x.data_ptr(), token_stride, head_stride


def _matrix(x: torch.Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0), FORMS[x.dtype]


def _native_batch(batch: KVBatch) -> _native.Batch:
    """The batch's addresses, looked up once per batch: its layers share them."""
    key = id(batch)
    known = _batches.get(key)
    if known is not None and known[0]() is batch:
        return known[1]
    tensors = [getattr(batch, name) for name in BATCH_DTYPES]
    for (name, dtype), tensor in zip(BATCH_DTYPES.items(), tensors, strict=True):
        assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
        assert tensor.device.type == "cpu", f"{name} is on {tensor.device}"
        assert tensor.is_contiguous(), f"{name} is not contiguous, its strides are {tensor.stride()}"
    pages, opened, slots, starts, contexts, entry_starts, entries, seals = tensors
    assert pages.shape == opened.shape, f"page_table {tuple(pages.shape)}, open_table {tuple(opened.shape)}"
    sequences = contexts.shape[0]
    assert starts.shape[0] == entry_starts.shape[0] == sequences + 1, f"{sequences} sequences, {starts.shape[0]} starts"
    group = batch.group
    native = _native.Batch(
        [tensor.data_ptr() for tensor in tensors],
        [*pages.shape, slots.shape[0], sequences, entries.shape[0], seals.shape[0]],
        [group.num_kv_heads, group.k_head_size, group.v_head_size, batch.block_tokens],
    )
    _batches[key] = (weakref.ref(batch, lambda _: _batches.pop(key, None)), native)
    return native
