"""What the system sees of a cache after a peak: its own pages, and the process. Runs in a process of its own.

    python -m ktransformer2.bench.footprint PEAK_BYTES [MODEL DTYPE]    prints one JSON object

Without a model: sequences of 8,192 tokens until the peak is committed, every page written. Then (1) `clear()`; and,
after a second peak, (2) nothing but time: the clock passes `cached_idle_s` and `maintain` runs. With a model the peak
is one prompt through the engine.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from dataclasses import dataclass

import psutil

from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.own_process import answer_of
from ktransformer2.bench.shapes import STATIC_TOKENS, smollm2
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.kernels.batch import KVBatch
from ktransformer2.layout import ExtentLayout, Form, unpack_page

_CHUNK_TOKENS = 512
_MAINTAIN_CALLS = 16


@dataclass(frozen=True)
class Footprint:
    """Bytes. `rss_growth` is against the process before the first peak."""

    peak_committed: int
    peak_resident: int
    resident_after_clear: int
    rss_growth_after_clear: int
    resident_after_idle: int
    rss_growth_after_idle: int

    @property
    def resident_after(self) -> int:
        return max(self.resident_after_clear, self.resident_after_idle)

    @property
    def rss_growth_after(self) -> int:
        return max(self.rss_growth_after_clear, self.rss_growth_after_idle)


def measure(*arguments: str) -> Footprint:
    """Run this file as a process of its own. Raises: RuntimeError with its last words where it fails."""
    return Footprint(**answer_of("footprint", *arguments))


def touch(batch: KVBatch) -> None:
    """Write every page that the batch names, as a model would: only then does the system hold it."""
    group, size = batch.group, batch.block_tokens
    extent_bytes = {
        form: ExtentLayout.uniform(group, size, form).extent_bytes for form in (Form.FP32, Form.BF16, Form.INT8)
    }
    blocks = sorted(set(batch.entries[:, 0].tolist()))
    for table in (batch.page_table, batch.open_table):
        for entry in table[blocks, 0].tolist():
            if entry:
                address, form, _ = unpack_page(entry)
                ctypes.memset(address, 1, extent_bytes[form])


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


def _fill(cache: KVCache, peak_bytes: int, text: int) -> tuple[int, int]:
    """Sequences until `peak_bytes` are committed, then all of them released; (committed, resident) at the peak."""
    tables = []
    while cache.stats().committed_bytes < peak_bytes:
        table = cache.new_table()
        tables.append(table)
        for start in range(0, STATIC_TOKENS, _CHUNK_TOKENS):
            assert cache.allocate(table, _CHUNK_TOKENS), "the limit is below the peak"
            (batch,) = cache.prepare([(table, _CHUNK_TOKENS)])
            if start + _CHUNK_TOKENS == STATIC_TOKENS:
                touch(batch)
            cache.publish(table, [text + len(tables)] * _CHUNK_TOKENS)
    peak = cache.stats().committed_bytes, cache.resident_bytes()
    for table in tables:
        cache.release(table)
    return peak


def _without_model(peak_bytes: int) -> Footprint:
    clock = _Clock()
    cache = KVCache(smollm2(), CacheConfig(), clock=clock)
    start = _rss()
    committed, resident = _fill(cache, peak_bytes, 0)
    cache.clear()
    after_clear = cache.resident_bytes(), _rss() - start
    _fill(cache, peak_bytes, 1000)
    return Footprint(committed, resident, *after_clear, *_after_idle(cache, clock, start))


def _after_idle(cache: KVCache, clock: _Clock, start: int) -> tuple[int, int]:
    clock.now += cache.config.cached_idle_s + 1
    for _ in range(_MAINTAIN_CALLS):
        cache.maintain()
    return cache.resident_bytes(), _rss() - start


def _with_model(num_tokens: int, model: str, dtype: str) -> Footprint:
    """The peak is a prompt of `num_tokens`; the process is looked at after a short prompt has warmed the model up."""
    from ktransformer2.bench.subject import load_subject  # transformers: a process without a model has no part of it

    clock = _Clock()
    loaded = load_subject(BenchOptions(model=model or None), dtype).model
    cache = KVCache(loaded.geometry, CacheConfig(), loaded.fingerprint, clock)
    engine = Engine(loaded, cache)

    def answer(first: int, length: int) -> tuple[int, int]:
        engine.add([(first + i * i) % loaded.vocab_size for i in range(length)], SamplingParams(max_new_tokens=2))
        peak = 0, 0
        while engine.has_work:
            engine.step()
            peak = max(peak, (cache.stats().committed_bytes, cache.resident_bytes()))
        return peak

    answer(1, 2 * _CHUNK_TOKENS)
    cache.clear()
    start = _rss()
    committed, resident = answer(2, num_tokens)
    cache.clear()
    after_clear = cache.resident_bytes(), _rss() - start
    answer(3, num_tokens)
    return Footprint(committed, resident, *after_clear, *_after_idle(cache, clock, start))


def _main(arguments: list[str]) -> None:
    amount, model = int(arguments[0]), arguments[1:]
    found = _with_model(amount, model[0], model[1]) if model else _without_model(amount)
    print(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    _main(sys.argv[1:])
