"""What a round of each part asks, and how often: a prompt and decoding, a warm prefix, requests at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ktransformer2.bench.outcome import say
from ktransformer2.bench.peers.contenders import Contender
from ktransformer2.bench.peers.field import Field
from ktransformer2.bench.peers.process import PeerProcess, Read

TOKENS_PER_ROUND = 8
SUFFIX_TOKENS = 16
Series = dict[str, list[float]]


@dataclass(frozen=True)
class Effort:
    """How much is measured. `reading_s`, `batch_s`: another round only while it would end within so many seconds."""

    decode_rounds: int
    readings: int
    reading_s: float
    warm_rounds: int
    num_requests: int
    request_tokens: int
    answer_tokens: int
    batches: int
    batch_s: float


FULL = Effort(12, 3, 420.0, 6, 8, 1_000, 64, 3, 240.0)
QUICK = Effort(3, 1, 0.0, 2, 4, 128, 16, 1, 0.0)


@dataclass(frozen=True)
class Measured:
    """At one length of prompt: seconds to the first token of every reading, and seconds a token of every round."""

    num_tokens: int
    first_s: Series
    token_s: Series
    peak_bytes: dict[str, int]


def repeated(
    round_: Callable[[], None], most: int, budget_s: float, clock: Callable[[], float] = time.monotonic
) -> int:
    """Once, and up to `most` times while another one, as long as the last, would end within the budget; how often."""
    began = clock()
    for count in range(1, most + 1):
        before = clock()
        round_()
        now = clock()
        if now - began + now - before > budget_s:
            return count
    return most


def warm_up(field: Field, contenders: Sequence[Contender], ids: Sequence[int]) -> None:
    """Weights are in memory and threads are awake: another text, a few tokens."""

    def ask(peer: PeerProcess) -> None:
        peer.read(ids, 4)
        peer.decode(4)

    field.turn(contenders, ask)


def read_and_decode(field: Field, contenders: Sequence[Contender], prompt: Sequence[int], effort: Effort) -> Measured:
    """Everybody reads the prompt, then all decode behind it in turns; the first round of decoding is not counted."""
    room = (effort.decode_rounds + 1) * TOKENS_PER_ROUND
    first_s: Series = {}
    token_s: Series = {}

    def reading() -> None:
        say(f"{len(contenders)} contenders read {len(prompt):,} tokens")
        for name, found in field.turn(contenders, lambda peer: peer.read(prompt, room)).items():
            first_s.setdefault(name, []).append(found.first_s)

    repeated(reading, effort.readings, effort.reading_s)
    for number in range(effort.decode_rounds + 1):
        say(f"decoding behind {len(prompt):,} tokens, round {number} of {effort.decode_rounds}")
        for name, seconds in field.turn(contenders, lambda peer: peer.decode(TOKENS_PER_ROUND)).items():
            if number:
                token_s.setdefault(name, []).append(median(seconds))
    done = [contender.name for contender in contenders if contender.name not in field.failures]
    return Measured(
        len(prompt),
        {name: first_s[name] for name in done},
        {name: token_s[name] for name in done},
        {name: field.peak_bytes(name) for name in done},
    )


def go_on(
    field: Field, contenders: Sequence[Contender], text: Sequence[int], num_tokens: int, effort: Effort
) -> Series:
    """Seconds to the first token behind a prefix of `num_tokens` that was read before and a suffix that is new."""
    prefix = list(text[:num_tokens])
    found: Series = {}

    def behind(suffix: Sequence[int]) -> dict[str, Read]:
        return field.turn(contenders, lambda peer: peer.read([*prefix, *suffix], 0, reuse=True))

    behind([])
    for number in range(effort.warm_rounds + 1):
        say(f"a new suffix, round {number} of {effort.warm_rounds}")
        start = num_tokens + number * SUFFIX_TOKENS
        for name, read in behind(text[start : start + SUFFIX_TOKENS]).items():
            if number:
                found.setdefault(name, []).append(read.first_s)
    return {name: seconds for name, seconds in found.items() if name not in field.failures}


def at_once(field: Field, contenders: Sequence[Contender], text: Sequence[int], effort: Effort) -> Series:
    """Seconds until all requests, which start together, have all their tokens."""
    length = effort.request_tokens
    prompts = [list(text[i * length : (i + 1) * length]) for i in range(effort.num_requests)]
    found: Series = {}

    def batch() -> None:
        say(f"{len(prompts)} requests of {length:,} + {effort.answer_tokens} tokens at once")
        for name, seconds in field.turn(contenders, lambda peer: peer.batch(prompts, effort.answer_tokens)).items():
            found.setdefault(name, []).append(seconds)

    repeated(batch, effort.batches, effort.batch_s)
    return {name: seconds for name, seconds in found.items() if name not in field.failures}
