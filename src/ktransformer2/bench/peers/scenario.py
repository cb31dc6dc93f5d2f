"""The scenario: who runs, the parts asked for, rows for people.

decode     the first token and decoding behind 512 and 8,000 tokens, everybody
context    the same at lengths between, defaults on the same file: the picture
warm       a new suffix behind a prefix that was read before
batch      eight requests at once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ktransformer2.bench.corpus import text_of
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.peers import plot, summary
from ktransformer2.bench.peers.contenders import Contender, contenders
from ktransformer2.bench.peers.field import Field
from ktransformer2.bench.peers.model_files import model_in
from ktransformer2.bench.peers.parts import FULL, QUICK, Measured, Series, at_once, go_on, read_and_decode, warm_up
from ktransformer2.bench.rounds import spread
from ktransformer2.errors import ConfigError
from ktransformer2.models.demo import smollm2_from_wheel
from ktransformer2.models.loading import computes_bf16
from ktransformer2.models.store import cache_directory

PARTS = ("decode", "context", "warm", "batch")
SHORT_TOKENS, LONG_TOKENS = 512, 8_000
LENGTHS = (SHORT_TOKENS, 2_048, 4_096, LONG_TOKENS)
MAX_TOKENS = 8_192
_WARM_UP_TOKENS = 64
Row = dict[str, object]


def run(options: BenchOptions) -> Outcome:
    """The parts asked for. Side effects: one process a contender; models are converted the first time."""
    source = _source(options)
    wanted = [c for c in contenders(computes_bf16(), MAX_TOKENS) if any(map(options.wants, c.parts))]
    text, threads, effort = _text(source), torch.get_num_threads(), QUICK if options.quick else FULL
    warm: Series = {}
    batch: Series = {}
    with Field(lambda form: model_in(form, source), threads, options.seed) as field:
        field.start(wanted)
        warm_up(field, wanted, text[-_WARM_UP_TOKENS:])
        measured = [read_and_decode(field, who, text[:length], effort) for length, who in schedule(options, wanted)]
        if options.wants("warm"):  # behind the longest prompt, which most of them have read by now
            warm = go_on(field, field.running("warm"), text, lengths(options)[-1], effort)
        if options.wants("batch"):
            batch = at_once(field, field.running("batch"), text, effort)
    rows = [row for each in measured for row in _rows_of(each, wanted)]
    rows += [{"part": "a new suffix", "contender": name, **spread(s).as_row("first_s")} for name, s in warm.items()]
    num_tokens = effort.num_requests * (effort.request_tokens + effort.answer_tokens)
    rows += [
        {
            "part": f"{effort.num_requests} requests at once",
            "contender": name,
            "tokens_per_s": num_tokens / spread(s).median,
        }
        for name, s in batch.items()
    ]
    picture = plot.in_terminal(rows)
    if picture is not None:
        say("\n" + picture)
    rows += [{"part": "failed", "contender": name, "why": why} for name, why in field.failures.items()]
    about: dict[str, object] = {"threads": threads, "model": source.name, "prompts": lengths(options)}
    return Outcome(rows, _summary(wanted, measured, warm, batch), about | {"contenders": field.abouts})


def lengths(options: BenchOptions) -> list[int]:
    """Tokens of the prompts, in rising order."""
    most = SHORT_TOKENS if options.quick else LONG_TOKENS
    most = min(most, options.max_tokens or most)
    return [length for length in LENGTHS if length <= most] or [most]


def schedule(options: BenchOptions, wanted: Sequence[Contender]) -> Iterator[tuple[int, list[Contender]]]:
    """Who is measured at which length: everybody at both ends, those of the picture between, too."""
    parts_at = {length: {"context"} for length in lengths(options)}
    for end in (lengths(options)[0], lengths(options)[-1]):
        parts_at[end].add("decode")
    for length, parts in parts_at.items():
        who = [c for c in wanted if any(part in parts and options.wants(part) for part in c.parts)]
        if who:
            yield length, who


def _source(options: BenchOptions) -> Path:
    """A GGUF file: what llama.cpp reads. Raises: ConfigError."""
    if options.model is None:
        return smollm2_from_wheel(cache_directory())
    if not options.model.endswith(".gguf") or not Path(options.model).is_file():
        raise ConfigError(
            f"bench peers takes a .gguf file, which llama.cpp reads and which is converted for all others; "
            f"{options.model!r} is none"
        )
    return Path(options.model)


def _text(source: Path) -> list[int]:
    """Token ids of the English text: everybody gets the same."""
    tokenizer = Tokenizer.from_file(str(model_in("folder", source) / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text_of("english")).ids
    return ids


def _rows_of(measured: Measured, wanted: Sequence[Contender]) -> Iterator[Row]:
    standing = summary.Standing(wanted, measured.token_s)
    for contender in wanted:
        name = contender.name
        if name in measured.token_s:
            yield {
                "part": f"behind {measured.num_tokens:,} tokens",
                "contender": name,
                "runs": contender.runs,
                "prompt_tokens": measured.num_tokens,
                **spread(measured.first_s[name]).as_row("first_s"),
                **spread(measured.token_s[name]).as_row("ms_per_token", 1000.0),
                "times_ours": standing.over(name, standing.ours(contender.width)),
                "peak_mb": measured.peak_bytes[name] / 1e6,
                "readings": len(measured.first_s[name]),
            }


def _summary(
    wanted: Sequence[Contender], measured: Sequence[Measured], warm: Series, batch: Series
) -> dict[str, float]:
    at = {each.num_tokens: each for each in measured}
    found: dict[str, float] = {}
    for length, words in ((SHORT_TOKENS, "512"), (LONG_TOKENS, "8k")):
        if length in at:
            found |= summary.of_length(wanted, at[length].first_s, at[length].token_s, words)
    if SHORT_TOKENS in at and LONG_TOKENS in at:
        found |= summary.slowdown(wanted, at[SHORT_TOKENS].token_s, at[LONG_TOKENS].token_s)
    return found | summary.of_warm(wanted, warm) | summary.of_batch(wanted, batch)
