"""What a step costs beside its arithmetic, and what the lean runner saves of the rest.

    engine   steps of an engine on a model that computes nothing: schedule, block tables, sampling, publishing, upkeep
    runner   forward passes of the lean runner beside those of the transformers path, on the same weights and pages, in
             turns: one token behind a text, and a chunk of a prompt behind it

Nobody reads the text before: its pages hold zeros, which cost attention what any rows cost it. Times are of one thread
where the part is `engine`, of torch's threads where it is `runner`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch

from ktransformer2.bench import shapes
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.rounds import interleaved, ratio, spread
from ktransformer2.bench.threads import torch_threads
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.batch import CausalModel, FlatBatch

PARTS = ("engine", "runner")
BATCHES = (1, 32)
CONTEXTS = {"512": 512, "8k": 8_000}
_STEPS, _QUICK_STEPS = 400, 40
_ROUNDS, _QUICK_ROUNDS = 9, 3
_DECODES, _CHUNK_TOKENS = 8, 512
_PROMPT_TOKENS, _VOCAB = 200, 49_152
_MEMORY_BYTES = 2**30
Row = dict[str, object]
Result = tuple[list[Row], dict[str, float]]


class Idle:
    """A CausalModel of SmolLM2's shape that computes nothing and answers at once."""

    fingerprint, vocab_size, weight_bytes = b"idle", _VOCAB, 0

    def __init__(self) -> None:
        self.geometry = shapes.smollm2()
        self._logits = torch.rand(max(BATCHES), _VOCAB, generator=torch.Generator().manual_seed(0))

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        return self._logits[: batch.logit_rows.shape[0]]


def run(options: BenchOptions) -> Outcome:
    """The parts that are asked for. Side effects: `runner` may download the pinned wheel."""
    rows: list[Row] = []
    summary: dict[str, float] = {}
    dtype = options.dtype or "fp32"
    parts: dict[str, Callable[[BenchOptions], Result]] = {"engine": _engine, "runner": partial(_runner, dtype=dtype)}
    for name, part in parts.items():
        if options.wants(name):
            more_rows, more = part(options)
            rows += more_rows
            summary |= more
    return Outcome(rows, summary, {"dtype": dtype, "threads": torch.get_num_threads()})


def _engine(options: BenchOptions) -> Result:
    num_steps = _QUICK_STEPS if options.quick else _STEPS
    rows: list[Row] = []
    summary: dict[str, float] = {}
    with torch_threads(1):
        for batch in BATCHES:
            seconds = step_seconds(batch, num_steps)
            rows.append({"part": "engine", "batch": batch, **spread(seconds).as_row("ms_per_step", 1000.0)})
            summary[f"engine_overhead_ms_b{batch}"] = 1000 * median(seconds)
    return rows, summary


def step_seconds(batch: int, num_steps: int) -> list[float]:
    """Seconds of steps that decode one token of each of `batch` sequences, everything but the model's own work."""
    model = Idle()
    cache = KVCache(model.geometry, CacheConfig(memory_bytes=_MEMORY_BYTES), model.fingerprint)
    engine = Engine(model, cache)
    answer = SamplingParams(max_new_tokens=num_steps + _PROMPT_TOKENS, ignore_eos=True)
    for number in range(batch):
        engine.add([number, *range(1, _PROMPT_TOKENS)], answer)
    while engine.stats().last_step_tokens != batch or engine.stats().num_waiting:
        engine.step()
    seconds = []
    for _ in range(num_steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    engine.close()
    cache.close()
    return seconds


class Behind:
    """A runner behind a text of `num_tokens` that nobody read."""

    def __init__(self, model: CausalModel, num_tokens: int) -> None:
        self._model = model
        self._cache = KVCache(model.geometry, CacheConfig(memory_bytes=_MEMORY_BYTES), model.fingerprint)
        self._table = self._cache.new_table(publish=False)
        assert self._cache.allocate(self._table, num_tokens), f"no room for {num_tokens} tokens"
        self._cache.publish(self._table, [1] * num_tokens)

    def _compute(self, num_tokens: int) -> None:
        table = self._table
        assert self._cache.allocate(table, num_tokens), f"no room for {num_tokens} tokens"
        ids = torch.arange(1, num_tokens + 1) % self._model.vocab_size
        positions = torch.arange(table.num_tokens, table.num_tokens + num_tokens)
        kv = self._cache.prepare([(table, num_tokens)])
        self._model.forward(FlatBatch(ids, positions, kv, torch.tensor([num_tokens - 1])))

    def decode(self) -> None:
        """Some tokens, one by one."""
        for _ in range(_DECODES):
            self._compute(1)
            self._cache.publish(self._table, [1])

    def read(self) -> None:
        """A chunk of a prompt, which is forgotten again."""
        self._compute(_CHUNK_TOKENS)
        self._cache.abandon(self._table)

    def close(self) -> None:
        self._cache.close()


def _runner(options: BenchOptions, dtype: str) -> Result:
    from ktransformer2.bench.subject import load_subject
    from ktransformer2.models.hf import HFModel

    lean = load_subject(options, dtype).model
    assert lean.runner == "lean", f"the model takes the {lean.runner} path: there is nothing to compare"
    models = {"lean": lean, "transformers": HFModel(lean.model, weights_hash=b"")}
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    rows: list[Row] = []
    summary: dict[str, float] = {}
    for name, num_tokens in CONTEXTS.items():
        behind = {runner: Behind(model, num_tokens) for runner, model in models.items()}
        for work, per, calls in (
            ("decode", _DECODES, {runner: each.decode for runner, each in behind.items()}),
            ("prefill", _CHUNK_TOKENS, {runner: each.read for runner, each in behind.items()}),
        ):
            say(f"{work} behind {num_tokens:,} tokens")
            seconds = interleaved(calls, rounds)
            rows += [_row(f"{work} behind {num_tokens:,} tokens", runner, per, seconds) for runner in models]
            gain = ratio(seconds["transformers"], seconds["lean"]).median
            summary[f"lean_vs_transformers_{work}_{name}"] = gain
        for each in behind.values():
            each.close()
    return rows, summary


def _row(part: str, runner: str, tokens: int, seconds: Mapping[str, Sequence[float]]) -> Row:
    return {
        "part": part,
        "runner": runner,
        **spread(seconds[runner]).as_row("ms_per_token", 1000.0 / tokens),
        "times_lean": ratio(seconds[runner], seconds["lean"]).median,
    }
