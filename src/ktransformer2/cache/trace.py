"""Records which blocks each request read and left, as numbers: no text, no tokens, no hash that could be looked up.

The format is that of `bench policy` (NDJSON, Mooncake's fields): a header, then a line a request when it is released.

    {"format": "ktransformer-trace/1", "block_tokens": 64}
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [...]}

An id is a keyed hash of a block's prefix hash under a secret that is drawn for the file and never written: ids are
equal where prefixes are, within one file, and say nothing else. The last id may be of a partly filled block. A request
that was preempted is two lines, as the cache saw it: what it had computed comes back as the prompt of the second.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from typing import IO, Protocol

from ktransformer2.cache.block import BlockTable

FORMAT = "ktransformer-trace/1"
_ID_BITS = 52  # a number that every JSON reader keeps exactly; a million blocks collide with a chance of 1e-4


class CacheObserver(Protocol):
    """Who is told of requests. Called on the cache's own thread, between its steps; it must not call back."""

    def adopted(self, table: BlockTable, prompt_tokens: int) -> None:
        """A request of so many prompt tokens got its room; `table.cached_tokens` of them were found."""

    def released(self, table: BlockTable) -> None:
        """The request is about to let its blocks go."""


class TraceRecorder:
    """Writes a line for every request that is released, when it is `KVCache.observer`.

    `file` takes text, one JSON object a line, and is the caller's to close. `block_tokens`: the cache's. `clock`:
    seconds. `num_requests`: lines written. `error`: what ended the recording, which ends no request.
    """

    def __init__(self, file: IO[str], block_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = 0
        self.error: OSError | None = None
        self._file = file
        self._block_tokens = block_tokens
        self._clock = clock
        self._began_s = clock()
        self._secret = secrets.token_bytes(32)
        self._arrivals: dict[BlockTable, tuple[float, int]] = {}
        self._write({"format": FORMAT, "block_tokens": block_tokens})

    def adopted(self, table: BlockTable, prompt_tokens: int) -> None:
        self._arrivals[table] = (self._clock() - self._began_s, prompt_tokens)

    def released(self, table: BlockTable) -> None:
        arrival = self._arrivals.pop(table, None)
        if arrival is None or self.error is not None:
            return
        at_s, prompt_tokens = arrival
        prompt_tokens = min(prompt_tokens, table.num_tokens)  # cancelled before all of it was computed
        self._write(
            {
                "timestamp": round(1000 * at_s),
                "input_length": prompt_tokens,
                "output_length": table.num_tokens - prompt_tokens,
                "hash_ids": self._ids(table, prompt_tokens),
            }
        )
        self.num_requests += 1

    def _ids(self, table: BlockTable, prompt_tokens: int) -> list[int]:
        full = min(prompt_tokens // self._block_tokens, len(table.keys))
        ids = [self._id(key) for key in table.keys[:full]]
        rest = table.tokens[full * self._block_tokens : prompt_tokens]
        if rest and full == prompt_tokens // self._block_tokens:
            ids.append(self._id((table.keys[full - 1] if full else table.root) + rest.tobytes()))
        return ids

    def _id(self, data: bytes) -> int:
        digest = hashlib.blake2b(data, digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "little") >> (64 - _ID_BITS)

    def _write(self, line: dict[str, object]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.error = error
