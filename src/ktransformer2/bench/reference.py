"""The rival: an unmodified transformers model with its own caches. No other file of this room imports transformers.

Greedy answers with the margin of every choice, the spread of the model's own logits, and three ways to decode. Knows
nothing of the package's cache. Invariant: end tokens are never special here: an answer has the length asked for.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from ktransformer2.models.hf import cache_keyword

SPREAD_COPIES = 8
SPREAD_CHUNK = 64
SPREAD_LAST = 8


@dataclass(frozen=True)
class GreedyRun:
    """A greedy answer. `margins[i]` is the reference's own distance between the two best logits at token i."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


@contextmanager
def _greedy_config(model: PreTrainedModel, num_new: int, **more: Any) -> Iterator[None]:
    """`generate` fills what a config leaves at None from the model's own, so the model's own is exchanged."""
    before = model.generation_config
    values = {"do_sample": False, "max_new_tokens": num_new, "eos_token_id": None, "pad_token_id": 0, **more}
    model.generation_config = GenerationConfig.from_dict(values)
    try:
        yield
    finally:
        model.generation_config = before


def _generate(model: PreTrainedModel, ids: torch.Tensor, **more: Any) -> Any:
    generate: Any = model.generate  # its annotations are a mixin's, which a checker takes for a tensor
    return generate(ids, attention_mask=torch.ones_like(ids), **more)


def greedy_run(model: PreTrainedModel, prompt: Sequence[int], num_new: int, cache: Any = None) -> GreedyRun:
    """What `generate` answers to one prompt alone. `cache`: another one than `generate` would make."""
    ids = torch.tensor([list(prompt)])
    given = {} if cache is None else {cache_keyword(model): cache}
    with torch.inference_mode(), _greedy_config(model, num_new, output_logits=True, return_dict_in_generate=True):
        found = _generate(model, ids, **given)
    best = [logits[0].float().topk(2).values for logits in found.logits]
    return GreedyRun(tuple(found.sequences[0, len(prompt) :].tolist()), tuple(float(b[0] - b[1]) for b in best))


def answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_new: int, cache: Any = None, **settings: Any
) -> list[list[int]]:
    """What `generate` adds to the prompts, padded on the left; random numbers are the same in every call.

    `cache`: another one than `generate` would make. `settings` go into the generation config, an assistant_model does
    not. An end token is one as any other.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    given = {} if cache is None else {cache_keyword(model): cache}
    if "assistant_model" in settings:
        given["assistant_model"] = settings.pop("assistant_model")
    torch.manual_seed(0)
    generate: Any = model.generate
    with torch.inference_mode(), _greedy_config(model, num_new, **settings):
        found = generate(ids, attention_mask=mask, **given)
    return [row[longest:].tolist() for row in found]


def shallow(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model of the first `num_layers` layers, with weights of its own: a helper that proposes tokens."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    kind: Any = type(model)  # its constructor has no annotations
    helper: PreTrainedModel = kind(config).to(model.dtype)
    helper.load_state_dict(model.state_dict(), strict=False)
    helper.train(False)
    return helper


class Reference:
    """Answers of `model.generate` with DynamicCache, and what is needed to judge a difference from them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache = cache_keyword(model)

    def greedy(self, prompt: Sequence[int], num_new: int) -> GreedyRun:
        """What stock `generate` answers to one prompt alone."""
        return greedy_run(self.model, prompt, num_new, DynamicCache(config=self.model.config))

    def next_logits(self, ids: Sequence[int], copies: int = 1, chunks: Sequence[int] = ()) -> torch.Tensor:
        """Logits [vocab] in fp32 after the last of `ids`, computed `copies` at once, or in chunks of these lengths."""
        rows = torch.tensor([list(ids)]).repeat(copies, 1)  # [copies, T]
        cache = DynamicCache(config=self.model.config)
        logits = torch.empty(0)
        with torch.inference_mode():
            for part in torch.split(rows, list(chunks) or [rows.shape[1]], dim=1):
                logits = self.model(input_ids=part, logits_to_keep=1, **{self._cache: cache}).logits
        return logits[0, -1].float()

    def margin(self, ids: Sequence[int]) -> float:
        """Distance between the two best logits after `ids`."""
        best = self.next_logits(ids).topk(2).values
        return float(best[0] - best[1])

    def spread(self, ids: Sequence[int]) -> float:
        """How far the reference is from itself after `ids`: the largest change of any of its ten best logits between
        batch 1, batch 8, chunked, and as `generate` has it, with the last tokens one by one."""
        alone = self.next_logits(ids)
        best = alone.topk(min(10, len(alone))).indices
        chunk, last = min(SPREAD_CHUNK, -(-len(ids) // 2)), min(SPREAD_LAST, len(ids) - 1)
        chunked = [chunk] * (len(ids) // chunk) + [len(ids) % chunk] * (len(ids) % chunk > 0)
        others = (
            self.next_logits(ids, copies=SPREAD_COPIES),
            self.next_logits(ids, chunks=chunked),
            self.next_logits(ids, chunks=[len(ids) - last] + [1] * last),
        )
        values = torch.stack([alone[best], *(other[best] for other in others)])  # [4, 10]
        return float((values.max(dim=0).values - values.min(dim=0).values).max())


class _TokenTimes:
    """A streamer for `generate` that only notes when tokens came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """`generate` calls this once; there is nothing to flush."""


class HFDecoder:
    """One way to decode with transformers. `prefill` or `adopt` first, then any number of `decode`, in seconds.

    `way`: `static` (StaticCache), `masked` (DynamicCache and an explicit mask, which keeps SDPA off its slow grouped
    path), or `stock` (what `generate` does by itself; `cache`: with another cache than its own).
    """

    def __init__(self, model: PreTrainedModel, way: str, max_cache_tokens: int, cache: Any = None) -> None:
        assert way in ("static", "masked", "stock"), way
        self.model, self.way = model, way
        if cache is None and way == "static":
            cache = StaticCache(config=model.config, max_cache_len=max_cache_tokens)
        self._cache: Any = DynamicCache(config=model.config) if cache is None else cache
        self._keyword = cache_keyword(model)
        self.token_ids: list[int] = []

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds until the first token of the answer is chosen."""
        assert not self.token_ids, "prefill comes once"
        begin = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor([list(prompt)])
            logits = self.model(input_ids=ids, logits_to_keep=1, **{self._keyword: self._cache}).logits
            first = int(logits[0, -1].argmax())
        self.token_ids = [*prompt, first]
        return time.perf_counter() - begin

    def adopt(self, other: HFDecoder) -> None:
        """Hold what `other`, whose cache is a DynamicCache, has read, as if read here: its rows are copied."""
        assert not self.token_ids, "adopt comes instead of prefill"
        with torch.inference_mode():
            for i, layer in enumerate(other._cache.layers):
                self._cache.update(layer.keys.clone(), layer.values.clone(), i)
        self.token_ids = list(other.token_ids)

    def decode(self, num_tokens: int) -> list[float]:
        """Seconds of each of `num_tokens` further tokens."""
        with torch.inference_mode():
            return self._stock(num_tokens) if self.way == "stock" else self._loop(num_tokens)

    def _loop(self, num_tokens: int) -> list[float]:
        seconds = []
        for _ in range(num_tokens):
            begin = time.perf_counter()
            at = len(self.token_ids)
            dtype = self.model.dtype
            mask = {"attention_mask": torch.zeros(1, 1, 1, at, dtype=dtype)} if self.way == "masked" else {}
            logits = self.model(
                input_ids=torch.tensor([self.token_ids[-1:]]),
                position_ids=torch.tensor([[at - 1]]),
                **mask,
                **{self._keyword: self._cache},
            ).logits
            self.token_ids.append(int(logits[0, -1].argmax()))
            seconds.append(time.perf_counter() - begin)
        return seconds

    def _stock(self, num_tokens: int) -> list[float]:
        """`generate` goes on from its cache; the times between its tokens, so that its own start is not counted."""
        times = _TokenTimes()
        ids = torch.tensor([self.token_ids])
        with _greedy_config(self.model, num_tokens + 1):
            found = _generate(self.model, ids, streamer=times, **{self._keyword: self._cache})
        self.token_ids = found[0].tolist()
        stamps = times.at[1:]  # the first `put` is the prompt
        return [after - before for before, after in pairwise(stamps)]


def save_by_hand(model: PreTrainedModel, prompt: Sequence[int], path: Path) -> None:
    """Read a prompt into a DynamicCache and save its tensors with torch."""
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([list(prompt)]), logits_to_keep=1, **{cache_keyword(model): cache})
        torch.save([(layer.keys.clone(), layer.values.clone()) for layer in cache.layers], path)


def first_token_by_hand(model: PreTrainedModel, path: Path, suffix: Sequence[int], mapped: bool) -> float:
    """Seconds to load what `save_by_hand` saved and to choose the first token behind `suffix`.

    `mapped`: the file is mapped and read while it is used, else it is read before.
    """
    begin = time.perf_counter()
    with torch.inference_mode():
        cache: Any = DynamicCache(config=model.config)
        for layer, (keys, values) in zip(cache.layers, torch.load(path, weights_only=True, mmap=mapped), strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values  # `update` would copy them once more
        start = cache.get_seq_length()
        positions = torch.arange(start, start + len(suffix)).unsqueeze(0)
        ids = torch.tensor([list(suffix)])
        given = {cache_keyword(model): cache, "position_ids": positions}
        int(model(input_ids=ids, logits_to_keep=1, **given).logits[0, -1].argmax())
    return time.perf_counter() - begin
