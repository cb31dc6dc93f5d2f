"""Contenders that decode behind one prompt, in turns: the loop, and transformers' side of it.

Rivals: StaticCache, and DynamicCache with an explicit mask (transformers at its best is the faster of the two), and
stock `generate`. Every contender holds the same prompt and decodes a few tokens in every round. The rivals read it
once, with stock's cache; the others get copies of its rows. Knows nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Protocol

from ktransformer2.bench.outcome import say
from ktransformer2.bench.reference import HFDecoder
from ktransformer2.bench.rounds import ratio, spread
from ktransformer2.bench.shapes import token_bytes
from ktransformer2.cache.stats import CacheStats
from ktransformer2.layout import Form, ModelGeometry
from ktransformer2.models.loading import LoadedModel

TOKENS_PER_ROUND = 8
WAYS = ("static", "masked", "stock")
BEST_WAYS = ("static", "masked")
Seconds = dict[str, list[float]]


class Contender(Protocol):
    def decode(self, num_tokens: int) -> list[float]:
        """Seconds of each of `num_tokens` further tokens."""
        ...


class Rival:
    """One way of transformers', with the attention that the model came with."""

    def __init__(self, loaded: LoadedModel, way: str, room: int) -> None:
        self._served = loaded.model
        self._decoder = HFDecoder(loaded.model.model, way, room)

    def prefill(self, prompt: Sequence[int]) -> float:
        with self._served.original_attention():
            return self._decoder.prefill(prompt)

    def adopt(self, other: Rival) -> None:
        self._decoder.adopt(other._decoder)

    def decode(self, num_tokens: int) -> list[float]:
        with self._served.original_attention():
            return self._decoder.decode(num_tokens)


def rivals(loaded: LoadedModel, prompt: Sequence[int], rounds: int) -> dict[str, Rival]:
    """Every way, holding the same rows of the prompt."""
    room = len(prompt) + (rounds + 1) * TOKENS_PER_ROUND + 16
    found = {way: Rival(loaded, way, room) for way in WAYS}
    say(f"transformers reads {len(prompt):,} tokens")
    found["stock"].prefill(prompt)
    for way in BEST_WAYS:
        found[way].adopt(found["stock"])
    return found


def decode_rounds(contenders: Mapping[str, Contender], rounds: int) -> Seconds:
    """Median seconds a token, for every contender and round, after a round that is not counted."""
    seconds: Seconds = {name: [] for name in contenders}
    for i in range(rounds + 1):
        say(f"decoding, round {i} of {rounds}")
        for name in list(contenders)[:: 1 if i % 2 else -1]:
            value = median(contenders[name].decode(TOKENS_PER_ROUND))
            if i:
                seconds[name].append(value)
    return seconds


def faster_of(ways: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> str:
    """The way with the smallest median."""
    return min(ways, key=lambda way: median(seconds[way]))


def kv_share(stats: CacheStats, geometry: ModelGeometry, num_tokens: int) -> float:
    """Bytes of all extents and tables that one sequence uses, its filling block included, over its bytes in fp16."""
    assert stats.num_cached_blocks == 0, f"{stats.num_cached_blocks} blocks belong to nobody"
    fp16 = num_tokens * sum(token_bytes(group, Form.FP16) for group in geometry.groups)
    return (stats.used_bytes + stats.table_bytes) / fp16


def row_of(name: str, ours: str, num_tokens: int, seconds: Seconds) -> dict[str, object]:
    """One contender's figures; `ours` names the one that it is compared with."""
    return {
        "part": f"one sequence behind {num_tokens:,} tokens",
        "contender": name,
        **spread(seconds[name]).as_row("ms_per_token", 1000.0),
        **ratio(seconds[name], seconds[ours]).as_row("times_ours"),
    }
