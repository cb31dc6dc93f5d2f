"""Traces of cache use: which blocks each request read, as numbers; no text, no tokens. Reads them.

`cache.trace` records them. A file is NDJSON, plain or gzipped. The first line may be a header, `{"format":
"ktransformer-trace/1", "block_tokens": 64}`; without one it is a Mooncake trace, whose blocks have 512 tokens. Every
other line is a request:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

milliseconds from the start, tokens, and one id for each block of the prompt, where an id stands for the block *and all
before it*: equal ids are a reusable prefix. An id behind the last full block is the partly filled one.
A line with `reqs` is a whole session of an agent (WEKA's kv-cache-tester, ids run-length coded, local to the session).

Invariants: requests are in order of time; an id has the same predecessor wherever it occurs.
"""

from __future__ import annotations

import gzip
import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from ktransformer2.cache.trace import FORMAT
from ktransformer2.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """One request. `session` groups requests of one conversation where the trace says so; -1: it does not."""

    at_s: float
    ids: Sequence[int]
    last_is_partial: bool = False
    session: int = -1


@dataclass(frozen=True)
class BlockTrace:
    """Requests in order of time."""

    name: str
    requests: Sequence[BlockRequest]

    @property
    def num_touches(self) -> int:
        return sum(len(request.ids) for request in self.requests)

    @property
    def num_unique(self) -> int:
        return len({i for request in self.requests for i in request.ids})


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Place and content of every line. Raises ConfigError, with the line, for a broken file."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number} is no JSON: {error}") from error


def read_block_trace(path: Path) -> BlockTrace:
    """The requests of a recorded or a Mooncake trace. Raises ConfigError, with the line, for a broken file."""
    block_tokens, requests = MOONCAKE_BLOCK_TOKENS, []
    for where, line in _lines(path):
        try:
            if "format" in line:
                if line["format"] != FORMAT:
                    raise ConfigError(f"{where}: format {line['format']!r} is not known; known: {FORMAT}")
                block_tokens = int(line["block_tokens"])
                continue
            ids = [int(i) for i in line["hash_ids"]]
            partial = len(ids) * block_tokens > int(line["input_length"])
            requests.append(BlockRequest(float(line["timestamp"]) / 1000, ids, partial))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where} is no request: {error!r}; see the format in docs/policies.md") from error
    if not requests:
        raise ConfigError(f"{path} holds no request")
    requests.sort(key=lambda request: request.at_s)
    return BlockTrace(path.name.split(".")[0], requests)


@dataclass(frozen=True)
class Interleaving:
    """How agents' sessions, which have no absolute times, are laid side by side: an assumption of the experiment.

    `num_lanes` users each run one drawn session after another, with a pause of `pause_s` on average between two.
    Whole sessions are drawn by `seed` until about `max_touches` block touches are reached.
    """

    seed: int
    max_touches: int = 2_000_000
    num_lanes: int = 8
    pause_s: float = 60.0


def read_agentic(path: Path, how: Interleaving) -> BlockTrace:
    """Sessions drawn and interleaved as `how` says. Raises ConfigError, with the line, for a broken file."""
    rng = random.Random(how.seed)
    sessions = list(_lines(path))
    rng.shuffle(sessions)
    lanes = [(rng.uniform(0, how.pause_s), lane) for lane in range(how.num_lanes)]
    requests: list[BlockRequest] = []
    touches = first_id = 0
    for number, (where, session) in enumerate(sessions):
        try:
            taken = sorted((float(r["t"]), [(int(a), int(n)) for a, n in r["h"]]) for r in session["reqs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where} is no session: {error!r}") from error
        size = sum(n for _, runs in taken for _, n in runs)
        if not taken or touches + size > how.max_touches:
            continue  # the next one may be short enough
        touches += size
        start_s, lane = heappop(lanes)
        top = 0
        for at_s, runs in taken:
            ids = array("q")  # there may be a hundred million of them
            for a, n in runs:
                ids.extend(range(first_id + a, first_id + a + n))
                top = max(top, first_id + a + n - 1)
            requests.append(BlockRequest(start_s + at_s, ids, session=number))
        first_id = top + 1
        heappush(lanes, (start_s + taken[-1][0] + rng.expovariate(1 / how.pause_s), lane))
    if not requests:
        raise ConfigError(f"{path} holds no session of at most {how.max_touches} block touches")
    requests.sort(key=lambda request: request.at_s)
    return BlockTrace(f"agentic seed {how.seed}", requests)
