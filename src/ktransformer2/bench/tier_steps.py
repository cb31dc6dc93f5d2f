"""Engine steps over a disk tier: what writing takes of a processor, and what bringing blocks up ahead is worth.

Writing. Texts are read and asked again under two policies; the writer's thread is measured by its own processor time,
the steps by what else the process took.

Fetching ahead. Texts lie on disk, pages dropped; a queue asks them in a drawn order through a memory that holds few of
them. `on` is the engine as it is; `off` brings a prompt's blocks up when its turn has come, while the batch waits. Both
answer the same requests, in turns. Hidden is what the batch does not wait with `on` of what it waits with `off`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktransformer2.bench.cold_files import drop_pages
from ktransformer2.bench.outcome import BenchOptions, say
from ktransformer2.bench.rounds import ratio, spread
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.lower import LowerStats
from ktransformer2.cache.prefixes import PrefixMatch
from ktransformer2.cache.promotion import Fetch, Turn
from ktransformer2.config import CacheConfig, EngineConfig, TierConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.batch import CausalModel
from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits

_DISK_BYTES = 8 * 10**9
_FLUSH_S = 120.0
_POLICIES = ("write_through_selective", "write_through")
Row = dict[str, object]
Result = tuple[list[Row], dict[str, float]]


@dataclass(frozen=True)
class Subject:
    """The model, and what is said of it."""

    model: CausalModel
    source: str
    dtype: str


@dataclass(frozen=True)
class Load:
    """How much is asked: texts and their lengths, requests, rounds."""

    num_texts: int
    text_tokens: int
    num_requests: int
    rounds: int
    question_tokens: int = 32
    answer_tokens: int = 16

    @classmethod
    def of(cls, options: BenchOptions) -> Load:
        return cls(4, 512, 8, 2) if options.quick else cls(8, 1024, 32, 6)


def subject(options: BenchOptions) -> Subject:
    """The pinned model, or the one that is named. Side effects: as `load_subject`; a quick run takes a random one."""
    from ktransformer2.bench.subject import load_subject, own_dtype
    from ktransformer2.models.demo import random_model

    dtype = options.dtype or own_dtype()
    if options.quick and options.model is None:
        return Subject(random_model(dtype).model, "random", dtype)
    loaded = load_subject(options, dtype)
    return Subject(loaded.model, loaded.source, dtype)


class _OnItsTurn(KVCache):
    """The same cache without fetching ahead: a prompt's blocks come up when it is its turn, and the batch waits."""

    def fetch(
        self, token_ids: Sequence[int], salt: bytes = b"", chain: list[bytes] | None = None, turn: Turn = ()
    ) -> Fetch | None:
        return None

    def match(self, token_ids: Sequence[int], salt: bytes = b"", chain: list[bytes] | None = None) -> PrefixMatch:
        fetch = super().fetch(token_ids, salt, chain)
        if fetch is not None:
            while self.is_loading(fetch):
                self.wait_for_tiers(0.01)
                self.receive()
            self.end_fetch(fetch)
        return super().match(token_ids, salt, chain)


class _Texts:
    """Texts of a vocabulary, drawn by seed, and questions behind them that never repeat."""

    def __init__(self, load: Load, vocab_size: int, seed: int) -> None:
        self._rng, self._vocab_size, self._load = random.Random(seed), vocab_size, load
        self.texts = [self._tokens(load.text_tokens) for _ in range(load.num_texts)]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def asked(self, text: int) -> list[int]:
        return self.texts[text] + self._tokens(self._load.question_tokens)

    def drawn(self) -> list[list[int]]:
        """The requests of one round."""
        return [self.asked(self._rng.randrange(self._load.num_texts)) for _ in range(self._load.num_requests)]


def _joined(
    model: CausalModel, folder: Path, kind: type[KVCache], memory_bytes: int | None, policy: str = _POLICIES[0]
) -> KVCache:
    config = CacheConfig() if memory_bytes is None else CacheConfig(memory_bytes=memory_bytes, cached_share_ratio=1.0)
    cache = kind(model.geometry, config, model.fingerprint)
    tier = DiskTier(folder, DiskLimits(_DISK_BYTES), cache.lineage)
    cache.join([tier], TierConfig(write_policy=policy, flush_s=_FLUSH_S))
    return cache


def _run(engine: Engine, requests: Sequence[Sequence[int]], answer_tokens: int) -> float:
    """Answer all of them; seconds of steps that computed nothing: the batch waited for a tier."""
    for prompt in requests:
        engine.add(list(prompt), SamplingParams(max_new_tokens=answer_tokens, ignore_eos=True))
    waited_s = 0.0
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        if engine.stats().last_step_tokens == 0:
            waited_s += time.perf_counter() - began
    return waited_s


def _closed(engine: Engine, cache: KVCache) -> LowerStats:
    """The figures after the orderly end."""
    engine.close()
    cache.close()
    stats = cache.tier_stats()
    assert stats is not None, "tiers have joined"
    assert not stats.failures, stats.failures
    return stats


# --- writing


def writer(subject: Subject, folder: Path, options: BenchOptions) -> Result:
    """The larger share of both policies."""
    load = Load.of(options)
    rows = [_writer_row(subject, folder / policy, policy, load, options.seed) for policy in _POLICIES]
    return rows, {"writer_cpu_share": max(float(str(row["share"])) for row in rows)}


def _writer_row(subject: Subject, folder: Path, policy: str, load: Load, seed: int) -> Row:
    say(f"{load.num_texts} texts are read and asked again, {policy}")
    cache = _joined(subject.model, folder, KVCache, None, policy)
    engine = Engine(subject.model, cache)
    texts = _Texts(load, subject.model.vocab_size, seed)
    began = time.process_time()
    for _ in range(2):
        _run(engine, [texts.asked(number) for number in range(load.num_texts)], load.answer_tokens)
    running = cache.tier_stats()
    assert running is not None, "tiers have joined"
    step_s = time.process_time() - began - running.writer_cpu_s
    stats = _closed(engine, cache)
    assert stats.written_blocks, "nothing was written"
    return {
        "part": "processor time of the writer's thread beside the steps",
        "policy": policy,
        "written_mb": stats.written_bytes / 1e6,
        "writer_s": stats.writer_cpu_s,
        "steps_s": step_s,
        "share": stats.writer_cpu_s / step_s,
    }


# --- fetching ahead


@dataclass(frozen=True)
class _Queue:
    """One run through the queue. `waited_s`: the batch waited for a tier."""

    seconds: float
    waited_s: float
    stats: LowerStats


def prefetch(subject: Subject, folder: Path, options: BenchOptions) -> Result:
    """A queue with and without fetching ahead."""
    load = Load.of(options)
    texts = _Texts(load, subject.model.vocab_size, options.seed)
    say(f"{load.num_texts} texts are read, and go to disk")
    cache = _joined(subject.model, folder, KVCache, None)
    engine = Engine(subject.model, cache)
    _run(engine, texts.texts, 1)
    assert _closed(engine, cache).written_blocks >= load.num_texts * (load.text_tokens // cache.config.block_tokens)
    ways = {"on": KVCache, "off": _OnItsTurn}
    found: dict[str, list[_Queue]] = {way: [] for way in ways}
    for number in range(load.rounds):
        requests = texts.drawn()
        for way in sorted(ways, reverse=number % 2 == 1):
            say(f"a queue of {load.num_requests}, fetching ahead {way}, {number + 1} of {load.rounds}")
            found[way].append(_queue(subject.model, folder, ways[way], requests, load))
    gain = ratio([run.seconds for run in found["off"]], [run.seconds for run in found["on"]]).median - 1
    return [_queue_row(way, runs, load) for way, runs in found.items()], {
        "prefetch_accuracy": _accuracy([run.stats for run in found["on"]]),
        "prefetch_hidden_share": 1
        - sum(run.waited_s for run in found["on"]) / sum(run.waited_s for run in found["off"]),
        "prefetch_throughput_gain": gain,
    }


def _queue(
    model: CausalModel, folder: Path, kind: type[KVCache], requests: Sequence[Sequence[int]], load: Load
) -> _Queue:
    """All of `requests` wait from the start, two run at once, and the memory holds half of the texts."""
    probe = KVCache(model.geometry, CacheConfig(), model.fingerprint)
    length = load.text_tokens + load.question_tokens + load.answer_tokens
    memory = probe.bytes_for(load.num_texts // 2 * length)
    probe.close()
    drop_pages(folder)
    cache = _joined(model, folder, kind, memory)
    engine = Engine(model, cache, config=EngineConfig(max_num_sequences=2))
    began = time.perf_counter()
    waited_s = _run(engine, requests, load.answer_tokens)
    seconds = time.perf_counter() - began
    assert engine.stats().num_finished == len(requests), engine.stats()
    stats = _closed(engine, cache)
    return _Queue(seconds, waited_s + (stats.fetch_s if kind is _OnItsTurn else 0.0), stats)


def _accuracy(stats: Sequence[LowerStats]) -> float:
    """Fetched blocks that a prompt found, over all fetched ones."""
    loaded = sum(each.loaded_blocks for each in stats)
    assert loaded, "nothing was fetched"
    return sum(each.used_blocks for each in stats) / loaded


def _queue_row(way: str, runs: Sequence[_Queue], load: Load) -> Row:
    stats = [run.stats for run in runs]
    counts = {
        name: sum(getattr(each, f"{name}_blocks") for each in stats)
        for name in ("loaded", "used", "unused", "late", "homeless")
    }
    return {
        "part": f"a queue of {load.num_requests} over {load.num_texts} texts of {load.text_tokens:,} tokens on disk",
        "fetching_ahead": way,
        "rounds": len(runs),
        **spread([run.seconds for run in runs]).as_row("seconds"),
        **counts,
        "batch_waited_s": sum(run.waited_s for run in runs),
    }
