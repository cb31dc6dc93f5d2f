"""What it costs to go on from a long prompt that was read before: in this process, in the next one, on another machine.

    memory    a new question behind a prefix that lies in memory, beside the question alone in a sequence that has the
              prefix already, and beside reading everything
    restart   the same in a new process after an orderly end, pages dropped, beside a DynamicCache of transformers that
              is saved and loaded by hand with torch, and beside llama.cpp's slots where it is installed
    valkey    the same from a server, where a valkey-server or redis-server is found
    salt      a text that another salt has read, beside one that nobody has: `prefix_salt`

The prefix is 8,000 tokens, 125 whole blocks. Every reading asks another question, so only the prefix can be found.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from ktransformer2.bench import llama_slots, prefix_salt
from ktransformer2.bench.cold_files import drop_pages, scratch
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.prefix_process import BY_HAND, SUFFIX_TOKENS, Reading, Task, Text, first_token
from ktransformer2.bench.rounds import ratio, spread
from ktransformer2.bench.subject import load_subject, own_dtype
from ktransformer2.bench.valkey_server import server, server_program
from ktransformer2.cache.block import BlockTable
from ktransformer2.engine.llm import LLM
from ktransformer2.models.batch import FlatBatch
from ktransformer2.models.loading import LoadedModel

PARTS = ("memory", "restart", "valkey", "salt")
FULL_TOKENS, QUICK_TOKENS = 8_000, 512
_UNALIGNED_TOKENS = 31  # fewer: the prefix then ends inside a block
Row = dict[str, object]
Result = tuple[list[Row], dict[str, float]]


def run(options: BenchOptions) -> Outcome:
    """All parts, or those asked for. Side effects: starts processes, and a server where there is one."""
    dtype, num_tokens = options.dtype or own_dtype(), prefix_tokens(options)
    parts: dict[str, Callable[[], Result]] = {
        "memory": lambda: _memory(load_subject(options, dtype), num_tokens, options),
        "restart": lambda: _restart(Task("kept", num_tokens, 0, dtype, options.model), options),
        "valkey": lambda: _valkey(Task("kept", num_tokens, 0, dtype, options.model), options),
        "salt": lambda: prefix_salt.measure(load_subject(options, dtype), options),
    }
    rows: list[Row] = []
    summary: dict[str, float] = {}
    for name, part in parts.items():
        if options.wants(name):
            more_rows, more = part()
            rows += more_rows
            summary |= more
    return Outcome(rows, summary, {"dtype": dtype, "prefix_tokens": num_tokens, "suffix_tokens": SUFFIX_TOKENS})


def prefix_tokens(options: BenchOptions) -> int:
    """Whole blocks of 64."""
    return max(64, (options.max_tokens or (QUICK_TOKENS if options.quick else FULL_TOKENS)) // 64 * 64)


# --- in this process


def _memory(loaded: LoadedModel, num_tokens: int, options: BenchOptions) -> Result:
    text = Text.of(loaded, num_tokens)
    num_cold, rounds = (1, 3) if options.quick else (2, 12)
    numbers = iter(range(1000))
    seconds: dict[str, list[float]] = {"cold": [], "warm": [], "resident": [], "inside a block": []}
    with LLM(loaded) as llm:
        first_token(llm, text.other)
        for _ in range(num_cold):
            say(f"{num_tokens:,} tokens are read")
            llm.cache.clear()
            seconds["cold"].append(first_token(llm, text.prefix + text.suffix(next(numbers)))[0])
        resident = _Resident(llm, text.prefix, loaded)
        ways: dict[str, Callable[[list[int]], float]] = {
            "warm": lambda suffix: _warm(llm, text.prefix, suffix),
            "resident": resident.go_on,
            "inside a block": lambda suffix: _warm(llm, text.prefix[:-_UNALIGNED_TOKENS], suffix),
        }
        say(f"{rounds} rounds of new questions")
        order, rng = list(ways), random.Random(options.seed)
        for number in range(1 + rounds):
            rng.shuffle(order)
            for way in order:
                took = ways[way](text.suffix(next(numbers)))
                if number:  # the first round is not counted
                    seconds[way].append(took)
        resident.leave()
    rows: list[Row] = [
        {"part": f"a new question behind {num_tokens:,} tokens", "way": way, **spread(values).as_row("first_token_s")}
        for way, values in seconds.items()
    ]
    return rows, {
        "warm_overhead": ratio(seconds["warm"], seconds["resident"]).median,
        "warm_speedup": median(seconds["cold"]) / median(seconds["warm"]),
    }


def _warm(llm: LLM, prefix: Sequence[int], suffix: Sequence[int]) -> float:
    seconds, usage = first_token(llm, [*prefix, *suffix])
    found = len(prefix) // 64 * 64
    assert found <= usage.cached_tokens < found + 64, f"{usage.cached_tokens} of {len(prefix)} tokens were found"
    return seconds


class _Resident:
    """A sequence that has the prefix, and goes on from it without a request: no queue, no lookup, no hash of it."""

    def __init__(self, llm: LLM, prefix: Sequence[int], loaded: LoadedModel) -> None:
        self._cache, self._model = llm.cache, loaded.model
        match = self._cache.match([*prefix, 0])
        self._table: BlockTable = self._cache.new_table()
        assert self._cache.allocate(self._table, 0, match), "no room for a table"
        assert self._table.num_tokens == len(prefix), f"{self._table.num_tokens} of {len(prefix)} tokens lie there"

    def go_on(self, suffix: Sequence[int]) -> float:
        """Seconds to the token behind `suffix`, in a copy of the sequence that is gone again afterwards."""
        table = self._cache.fork(self._table)
        began = time.perf_counter()
        assert self._cache.allocate(table, len(suffix)), "no room for a question"
        positions = torch.arange(table.num_tokens, table.num_tokens + len(suffix))
        kv = self._cache.prepare([(table, len(suffix))])
        last = torch.tensor([len(suffix) - 1])
        with torch.inference_mode():
            logits = self._model.forward(FlatBatch(torch.tensor(list(suffix)), positions, kv, last))
        int(logits[0].argmax())
        self._cache.publish(table, suffix)
        seconds = time.perf_counter() - began
        self._cache.release(table)
        return seconds

    def leave(self) -> None:
        self._cache.release(self._table)


# --- in the next process


def _restart(task: Task, options: BenchOptions) -> Result:
    rounds = 1 if options.quick else 5
    with scratch("prefix") as folder:
        kept, by_hand = folder / "kv", folder / "hand"
        by_hand.mkdir()
        say(f"a process reads {task.prefix_tokens:,} tokens and ends")
        cold = _with(task, directory=kept).run()
        say("the same by hand")
        saved = _with(task, way="saved", directory=by_hand).run()
        readings: dict[str, list[Reading]] = {way: [] for way in ("restored", *BY_HAND)}
        order, rng = list(readings), random.Random(options.seed)
        for number in range(1, 1 + rounds):
            rng.shuffle(order)
            for way in order:
                say(f"a new process, {way}, {number} of {rounds}")
                place = kept if way == "restored" else by_hand
                drop_pages(place)
                readings[way].append(_with(task, way=way, directory=place, number=number).run())
    seconds = {way: [each.first_token_s for each in found] for way, found in readings.items()}
    best = min(BY_HAND, key=lambda way: median(seconds[way]))
    part = f"a new question behind {task.prefix_tokens:,} tokens, in a new process"
    rows = [_reading_row(part, "cold", [cold])]
    rows += [_reading_row(part, way, found, saved.kept_bytes) for way, found in readings.items()]
    reused = min(each.restored_tokens.get("disk", 0) for each in readings["restored"])
    return rows + llama_slots.rows(part, task, options), {
        "restart_speedup": cold.first_token_s / median(seconds["restored"]),
        "restart_reused_share": reused / task.prefix_tokens,
        "restart_vs_handmade": ratio(seconds["restored"], seconds[best]).median,
    }


def _with(task: Task, way: str = "kept", directory: Path | None = None, number: int = 0) -> Task:
    place = "" if directory is None else str(directory)
    return Task(way, task.prefix_tokens, number, task.dtype, task.model, place, task.url, task.key_file)


def _reading_row(part: str, way: str, found: Sequence[Reading], by_hand_bytes: int = 0) -> Row:
    name = f"{way} by hand, torch.load" if way in BY_HAND else way
    kept = by_hand_bytes if way in BY_HAND else found[0].kept_bytes
    row: Row = {"part": part, "way": name, **spread([each.first_token_s for each in found]).as_row("first_token_s")}
    row |= {"processes": len(found), "kept_mb": kept / 1e6, "reused_tokens": min(each.cached_tokens for each in found)}
    return row | ({"end_s": found[0].end_s} if found[0].end_s else {})


# --- from a server


def _valkey(task: Task, options: BenchOptions) -> Result:
    part = f"a new question behind {task.prefix_tokens:,} tokens, from a server"
    if server_program() is None:
        missing = "no valkey-server or redis-server is on the PATH, or the package redis is missing"
        return [{"part": part, "way": missing}], {}
    with tempfile.TemporaryDirectory(prefix="bench-prefix-") as folder, server(Path(folder)) as (url, key_file):
        asked = Task("kept", task.prefix_tokens, 0, task.dtype, task.model, "", url, str(key_file))
        say(f"a process reads {task.prefix_tokens:,} tokens and ends; they go to {url}")
        cold = asked.run()
        found = []
        for number in range(1, 2 if options.quick else 6):
            say(f"a new process takes them from the server, {number}")
            found.append(_with(asked, way="restored", number=number).run())
    full = min(each.restored_tokens.get("remote", 0) for each in found)
    assert full == task.prefix_tokens, f"{full} of {task.prefix_tokens} tokens came from the server"
    speedup = cold.first_token_s / median(each.first_token_s for each in found)
    return [_reading_row(part, "cold", [cold]), _reading_row(part, "restored", found)], {"valkey_speedup": speedup}
