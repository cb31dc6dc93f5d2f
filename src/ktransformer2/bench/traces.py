"""Length traces of real services: when a request came, how long its prompt and its answer were. No text, no reuse.

Files are CSV (plain or gzipped) with the header `arrival_ms,input_tokens,output_tokens`, sorted by arrival.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktransformer2.errors import ConfigError

HEADER = ["arrival_ms", "input_tokens", "output_tokens"]


@dataclass(frozen=True)
class TraceRequest:
    """One request. `arrival_s` counts from the first request of the trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def _request(row: list[str], where: str) -> TraceRequest:
    try:
        arrival_ms, prompt, output = (float(row[0]), int(row[1]), int(row[2]))
    except (IndexError, ValueError) as error:
        raise ConfigError(f"{where}: {row!r} is not arrival_ms,input_tokens,output_tokens") from error
    if prompt < 0 or output < 0:
        raise ConfigError(f"{where}: a length is negative in {row!r}")
    return TraceRequest(arrival_ms / 1000, prompt, output)


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests that have a prompt and an answer. Raises ConfigError, with the line, for a broken file."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    rows = csv.reader(io.StringIO(text.decode()))
    header = next(rows, [])
    if header != HEADER:
        raise ConfigError(f"{path}: the header is {header!r}, not {HEADER!r}")
    requests = [_request(row, f"{path}:{number}") for number, row in enumerate(rows, start=2)]
    return [request for request in requests if request.prompt_tokens and request.output_tokens]


def thinned(requests: Sequence[TraceRequest], count: int) -> list[TraceRequest]:
    """Every k-th request, `count` of them, closer together by k, so that lengths and load stay those of the trace."""
    step = max(len(requests) // count, 1)
    return [dataclasses.replace(r, arrival_s=r.arrival_s / step) for r in requests[::step][:count]]
