"""Recording a run: what is written of it, what is not, and that it replays."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ktransformer2.bench.policy_sim import replay
from ktransformer2.bench.policy_trace import read_block_trace
from ktransformer2.cache.replacement.lru import LRU
from ktransformer2.cache.trace import TraceRecorder
from tests.cache.factories import Clock, append, make_cache, start

PROMPT = [5 + i % 9 for i in range(40)]


def record(*prompts: list[int]) -> list[dict[str, object]]:
    file, clock = io.StringIO(), Clock()
    cache = make_cache(clock=clock, kv="int8")
    cache.observer = TraceRecorder(file, 16, clock)
    for prompt in prompts:
        clock.now += 1.5
        table = start(cache, prompt)
        assert table is not None
        assert append(cache, table, [1] * 20)
        cache.release(table)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_equal_prefixes_have_equal_ids_and_nothing_else_is_told() -> None:
    header, first, second, third = record(PROMPT, [*PROMPT[:32], 1, 2], [0, *PROMPT])
    assert header == {"format": "ktransformer-trace/1", "block_tokens": 16}
    assert first.keys() == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (1500, 40, 20)
    ids = [line["hash_ids"] for line in (first, second, third)]
    assert all(isinstance(i, list) and len(i) == 3 for i in ids)
    assert ids[0][:2] == ids[1][:2]  # type: ignore[index]  # lists, as asserted
    assert len({*ids[0], *ids[1], *ids[2]}) == 7  # type: ignore[misc]
    assert record(PROMPT)[1]["hash_ids"] != ids[0]  # the secret is another one


def test_a_recorded_trace_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, record(PROMPT, PROMPT, PROMPT[:20]))))
    trace = read_block_trace(path)
    assert replay(trace.requests, lambda clock: LRU(), 10).hits == [0, 3, 1]
    assert [request.last_is_partial for request in trace.requests] == [True, True, True]


def test_a_full_disk_ends_the_recording_and_no_request() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left")

    cache = make_cache(kv="int8")
    recorder = cache.observer = TraceRecorder(Full(), 16, Clock())
    table = start(cache, PROMPT)
    assert table is not None
    cache.release(table)
    assert recorder.error is not None
    assert recorder.num_requests == 0


@pytest.mark.parametrize("tokens", [16, 17])
def test_a_whole_last_block_is_not_partial(tokens: int) -> None:
    line = record(PROMPT[:tokens])[1]
    assert len(line["hash_ids"]) == -(-tokens // 16)  # type: ignore[arg-type]  # a list
