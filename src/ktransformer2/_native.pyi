# The C++ kernels; see csrc/module.cpp. Rows are (address, token stride, head stride), strides in elements.
from collections.abc import Sequence

from ktransformer2.layout import RopeSpec

Rows = tuple[int, int, int]

version: int

class Batch:
    def __init__(self, addresses: Sequence[int], counts: Sequence[int], heads: Sequence[int]) -> None: ...

def isa_names() -> list[str]: ...
def store_kv(batch: Batch, column: int, k: Rows, v: Rows, form: int, num_threads: int) -> None: ...
def seal(isa: str, batch: Batch, column: int, k: Rows, v: Rows, form: int, num_threads: int) -> None: ...
def paged_attention(
    isa: str,
    batch: Batch,
    column: int,
    kv: tuple[Rows, Rows],
    q_out: tuple[Rows, Rows],
    form_heads_threads: tuple[int, int, int],
    params: tuple[float, int, float, int],
    rope: RopeSpec | None,
) -> None: ...
def read_bandwidth(num_bytes: int, num_threads: int, rounds: int) -> float: ...
