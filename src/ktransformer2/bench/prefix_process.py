"""One reading of a long prefix with a new question behind it, in a process of its own.

    python -m ktransformer2.bench.prefix_process TASK        a `Task` in JSON; prints a `Reading` in JSON

Every process first answers a short, unrelated text, so that weights are in memory and threads are awake: what is timed
is the prefix, not the start of a program. Ways:

    kept        nothing is known: the whole prompt is read; then the orderly end, which keeps it
    restored    what another process kept comes up from the tiers
    saved, read, mapped    the same by hand: a DynamicCache of transformers, saved and loaded with torch
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformer2.bench.corpus import text_of
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.own_process import answer_of
from ktransformer2.bench.reference import HFDecoder, first_token_by_hand, save_by_hand
from ktransformer2.bench.subject import load_subject
from ktransformer2.engine.llm import LLM
from ktransformer2.engine.outputs import Usage
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.loading import LoadedModel

SUFFIX_TOKENS = 64
_WARM_UP_TOKENS = 160
BY_HAND = ("read", "mapped")


@dataclass(frozen=True)
class Task:
    """`number`: which question. `directory`: where blocks, or the file made by hand, lie; empty: not on a disk.

    `url` and `key_file`: a server that keeps blocks; empty: none.
    """

    way: str
    prefix_tokens: int
    number: int
    dtype: str
    model: str | None = None
    directory: str = ""
    url: str = ""
    key_file: str = ""

    def run(self) -> Reading:
        """In a process of its own. Raises: RuntimeError with its last words where it fails."""
        return Reading(**answer_of("prefix_process", json.dumps(dataclasses.asdict(self))))


@dataclass(frozen=True)
class Reading:
    """Seconds to the first token, and how many tokens of the prompt came from where. `end_s`: the orderly end."""

    first_token_s: float
    cached_tokens: int = 0
    restored_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    kept_bytes: int = 0
    end_s: float = 0.0


@dataclass(frozen=True)
class Text:
    """A prefix of whole blocks, questions that go on from it, and another text."""

    token_ids: Sequence[int]
    prefix_tokens: int

    @classmethod
    def of(cls, loaded: LoadedModel, prefix_tokens: int) -> Text:
        return cls(loaded.tokenizer.encode(text_of("english")), prefix_tokens)

    @property
    def prefix(self) -> list[int]:
        return list(self.token_ids[: self.prefix_tokens])

    @property
    def other(self) -> list[int]:
        return list(self.token_ids[-_WARM_UP_TOKENS:])

    def suffix(self, number: int) -> list[int]:
        """The question of that number; none has the beginning of another."""
        start = self.prefix_tokens + number * SUFFIX_TOKENS
        found = list(self.token_ids[start : start + SUFFIX_TOKENS])
        assert len(found) == SUFFIX_TOKENS, f"the text has no question {number} behind {self.prefix_tokens} tokens"
        return found


def first_token(llm: LLM, prompt: Sequence[int]) -> tuple[float, Usage]:
    """Seconds from asking to the first token, and what the request cost."""
    began = time.perf_counter()
    seconds, usage = 0.0, None
    for chunk in llm.stream(list(prompt), SamplingParams(max_new_tokens=1, ignore_eos=True)):
        if chunk.token_ids:
            seconds = time.perf_counter() - began
        if chunk.output is not None:
            usage = chunk.output.usage
    assert usage is not None, "the stream has no end"
    return seconds, usage


def perform(task: Task) -> Reading:
    """Do it in this process."""
    loaded = load_subject(BenchOptions(model=task.model), task.dtype)
    text = Text.of(loaded, task.prefix_tokens)
    if task.way in ("kept", "restored"):
        return _by_cache(task, loaded, text)
    path = Path(task.directory) / "cache.pt"
    with loaded.model.original_attention():
        HFDecoder(loaded.model.model, "stock", 0).prefill(text.other)
        if task.way == "saved":
            began = time.perf_counter()
            save_by_hand(loaded.model.model, text.prefix, path)
            return Reading(time.perf_counter() - began, kept_bytes=path.stat().st_size)
        return Reading(first_token_by_hand(loaded.model.model, path, text.suffix(task.number), task.way == "mapped"))


def _by_cache(task: Task, loaded: LoadedModel, text: Text) -> Reading:
    """With the shipped defaults, but for the place."""
    server: dict[str, Any] = {"valkey_url": task.url, "valkey_key_file": task.key_file} if task.url else {}
    with LLM(loaded, persist=Path(task.directory) if task.directory else "auto", **server) as llm:
        first_token(llm, text.other)
        seconds, usage = first_token(llm, text.prefix + text.suffix(task.number))
        ends = time.perf_counter()
    stats = llm.cache.tier_stats()
    assert stats is not None, "nothing keeps anything"
    assert not stats.failures, stats.failures
    end_s = time.perf_counter() - ends
    return Reading(seconds, usage.cached_tokens, dict(usage.restored_tokens), sum(stats.held_bytes.values()), end_s)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(perform(Task(**json.loads(sys.argv[1]))))))
