"""The texts and traces that scenarios use, and prompts drawn by seed. Knows no model: it is handed an encoder.

The data lie in `benchmarks/data` of the repository; `KTRANSFORMER_BENCH_DATA` names another folder of the same shape.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ktransformer2.errors import ConfigError

Encode = Callable[[str], list[int]]
_SOURCES = {
    "english": "contracts/*.txt",
    "chinese": "text/civil_code_zh_excerpt.txt",
    "code": "code/*.txt",
    "wikitext": "text/wikitext2_excerpt.txt",
}
PROMPT_KINDS = ("english", "chinese", "code")
_MAX_CHARACTERS = 150_000


def data_folder() -> Path:
    """The folder with the data. Raises ConfigError, saying where it looked, where there is none."""
    named = os.environ.get("KTRANSFORMER_BENCH_DATA")
    places = (
        [Path(named)]
        if named
        else [
            *(folder / "benchmarks" / "data" for folder in (Path.cwd(), *Path.cwd().parents)),
            Path(__file__).parents[3] / "benchmarks" / "data",
        ]
    )
    for place in places:
        if (place / "traces").is_dir():
            return place
    raise ConfigError(
        f"no bench data in {places[0]}; run from a clone of the repository, or set KTRANSFORMER_BENCH_DATA to its "
        "benchmarks/data"
    )


def text_of(kind: str, folder: Path | None = None) -> str:
    """All text of a kind, files in order of name, at most 150,000 characters (what a tokenizer takes in a second)."""
    found = sorted((folder or data_folder()).glob(_SOURCES[kind]))
    if not found:
        raise ConfigError(f"no {kind} text: {folder or data_folder()}/{_SOURCES[kind]} names no file")
    share = _MAX_CHARACTERS // len(found)
    return "\n".join(path.read_text(encoding="utf-8")[:share] for path in found)


def trace_path(name: str, folder: Path | None = None) -> Path:
    """The file of a trace such as `azure_2023_conv`. Raises ConfigError with the names there are."""
    traces = {path.name.split(".")[0]: path for path in sorted(((folder or data_folder()) / "traces").glob("*.csv*"))}
    if name not in traces:
        raise ConfigError(f"no trace {name!r}; there are: {', '.join(traces)}")
    return traces[name]


def block_trace_path(name: str, folder: Path | None = None) -> Path:
    """The file of block ids such as `mooncake_conversation_blocks`. Raises ConfigError where it is missing."""
    path = (folder or data_folder()) / "traces" / f"{name}.jsonl.gz"
    if not path.is_file():
        raise ConfigError(f"no trace of blocks at {path}; it is part of the repository's benchmarks/data")
    return path


@dataclass(frozen=True)
class DrawnPrompt:
    """A slice of a real text, as token ids."""

    index: int
    kind: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Drawing:
    """How many prompts, how long at most, from which seed."""

    count: int
    max_tokens: int
    seed: int


def log_uniform(rng: random.Random, longest: int) -> int:
    """A length in 1..longest whose logarithm is uniform: as many prompts of 10-100 tokens as of 100-1,000."""
    return min(max(round(math.exp(rng.uniform(0.0, math.log(longest)))), 1), longest)


def draw_prompts(drawing: Drawing, encode: Encode, folder: Path | None = None) -> list[DrawnPrompt]:
    """Prompts that start anywhere in the text of a drawn kind. The same seed, encoder and data: the same prompts."""
    rng = random.Random(drawing.seed)
    tokens = {kind: encode(text_of(kind, folder)) for kind in PROMPT_KINDS}
    prompts = []
    for index in range(drawing.count):
        kind = rng.choice(PROMPT_KINDS)
        length = min(log_uniform(rng, drawing.max_tokens), len(tokens[kind]))
        start = rng.randrange(len(tokens[kind]) - length + 1)
        prompts.append(DrawnPrompt(index, kind, tuple(tokens[kind][start : start + length])))
    return prompts
