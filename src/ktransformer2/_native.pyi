"""
The C++ kernels, called by kernels/cpu.py. Rows are (address, token stride, head stride), strides in elements.
"""

from collections.abc import Sequence


class Batch:
    """
    The addresses of one kernels.batch.KVBatch; its tensors must outlive it.
    """

    def __init__(self, addresses: Sequence[int], counts: Sequence[int], heads: Sequence[int]) -> None:
        """
        Addresses in the order of kernels.batch.BATCH_DTYPES; counts of blocks, columns, tokens, sequences,
        entries, seals; heads: KV heads, size of K, size of V, tokens of a block. Raises ValueError.
        """

def isa_names() -> list[str]:
    """The instruction sets that this processor runs, fastest first."""

def store_kv(batch: Batch, column: int, k: tuple[int, int, int], v: tuple[int, int, int], form: int, num_threads: int) -> None:
    """See kernels.attention.store_kv."""

def seal(isa: str, batch: Batch, column: int, k: tuple[int, int, int], v: tuple[int, int, int], form: int, num_threads: int) -> None:
    """See kernels.attention.seal."""

def paged_attention(isa: str, batch: Batch, column: int, kv: tuple[tuple[int, int, int], tuple[int, int, int]], q_out: tuple[tuple[int, int, int], tuple[int, int, int]], form_heads_threads_prefetch: tuple[int, int, int, bool], params: tuple[float, int, float, int], rope: object | None) -> None:
    """
    See kernels.attention.paged_attention. `params`: scale, window, softcap, address of the sinks, where 0 means
    none of the last three; `rope`: a layout.RopeSpec.
    """

def norm_rows(isa: str, addresses: tuple[int, int, int, int], rows: int, size: int, form: int, eps: float, num_threads: int) -> None:
    """
    See kernels.decoder.rms_norm. `addresses`: x, residual (0: none), weight, out.
    """

def rotate_and_store(isa: str, batch: Batch, column: int, qkv: tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]], form_heads_threads: tuple[int, int, int], angles: tuple[int, int, int], norms: tuple[int, int, float]) -> None:
    """
    See kernels.decoder.rotate_and_store. `angles`: cosines, sines, how many a row has; `norms`: weights of
    queries and keys (0: none), eps.
    """

def gate_rows(isa: str, gate_up: int, out: int, rows: int, size: int, form: int, num_threads: int) -> None:
    """See kernels.decoder.silu_multiply."""

class PackedMatrix:
    """
    The addresses of one kernels.linear.PackedMatrix; its tensors must outlive it.
    """

    def __init__(self, tiles: int, bias: int, num_outputs: int, num_inputs: int, int4: bool) -> None:
        """`bias`: the address of fp32 numbers, 0 where there are none."""

def multiply_packed(isa: str, matrix: PackedMatrix, x: tuple[int, int, int], out: tuple[int, int, int], num_rows: int, num_threads: int) -> None:
    """
    See kernels.linear.multiply. `x`, `out`: (address, row stride in elements, form).
    """

def multiply_dense(isa: str, weights: tuple[int, int, int], bias: int, x: tuple[int, int, int], out: tuple[int, int, int], sizes: tuple[int, int, int], num_threads: int) -> None:
    """
    See kernels.linear.multiply_dense. `bias`: an address or 0; `sizes`: rows, inputs, outputs.
    """

def read_bandwidth(num_bytes: int, num_threads: int, rounds: int) -> float:
    """Bytes per second, the median of `rounds` passes."""
