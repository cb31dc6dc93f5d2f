"""Before a forward pass of an attached model: its tokens are looked up, what is missing is read, the rest is told.

A transformers cache sees no token, the model's calls do. Of a prompt that begins, what the cache has is adopted and
what it lacks is read in chunks, so that the model itself computes only the columns it is asked about. Of any other call
that is understood the tokens are told to the cache, which then can find them again.

Knows no `generate`. Invariant: a call that is not understood passes as it came, and its tokens are remembered as
nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import EngineConfig
from ktransformer2.integrations import generate_call as call
from ktransformer2.integrations.batch_rows import BatchRows
from ktransformer2.integrations.prompt_reader import PromptReader
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.models.hf import HFModel


@dataclass(frozen=True)
class CallUsage:
    """What one `generate` read: tokens of all its rows, and how many of them were cached."""

    prompt_tokens: int
    cached_tokens: int


@dataclass
class RunningCall:
    """The running `generate`. `plain`: as without the cache; `drafts`: it verifies several proposed tokens at once."""

    plain: bool
    drafts: bool
    reads_prompt: bool = True


class PromptHook:
    """A forward pre-hook. `running`: the `generate` that calls the model; `usage`: what the last one read."""

    def __init__(self, model: HFModel, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self.running: RunningCall | None = None
        self.usage = CallUsage(0, 0)

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Tells the cache the tokens of a call, and takes off the call what the cache has or reads itself."""
        cache = call.given_cache(kwargs)
        if not isinstance(cache, DynamicKVCache) or cache.kv is not self._cache or cache.rows is None:
            return None
        cache.tell(None)
        rows, real = cache.rows, None if args else call.new_columns(kwargs, cache.rows.num_columns)
        held = rows.lengths
        if real is None or not self._tokens_say_all(cache, kwargs, real):
            self._note(held, _num_columns(kwargs))
            return None
        self._note(held, int(real.sum()))
        if cache.is_paged and not held:
            kwargs = self._reuse(rows, kwargs, real)
        cache.tell(kwargs["input_ids"])
        return args, kwargs

    def _note(self, held: Sequence[int], num_new: int) -> None:
        """The first call of a `generate` reads its prompt: `num_new` tokens behind those that are held."""
        if self.running is not None and self.running.reads_prompt:
            self.running.reads_prompt = False
            self.usage = CallUsage(sum(held) + num_new, sum(held))

    def _tokens_say_all(self, cache: DynamicKVCache, kwargs: Mapping[str, Any], real: torch.Tensor) -> bool:
        """Whether the tokens alone decide what the keys of this call's columns are."""
        rows, geometry = cache.rows, self._model.geometry
        assert rows is not None, "a cache over this one has rows"
        lengths = rows.lengths or [0] * real.shape[0]
        if len(lengths) != real.shape[0] or (not cache.is_paged and not bool(real.all())):
            return False  # the step will refuse it, or a gathered view keeps padding as if it were text
        if call.first_odd_position(kwargs.get("position_ids"), real, lengths, rows.num_columns):
            return False
        longest = max(lengths) + int(real.sum(dim=1).max())
        return not geometry.shift_refused or longest <= geometry.max_positions  # further on its rotation changes

    def _reuse(self, rows: BatchRows, kwargs: dict[str, Any], real: torch.Tensor) -> dict[str, Any]:
        """The call without the columns that are read here; as it is where nothing can be taken off."""
        ids = kwargs["input_ids"]
        running = self.running
        kept = None if running is None else call.columns_kept(self._model.model, kwargs, running.drafts)
        head = 0 if kept is None else ids.shape[1] - kept
        if head <= 0:
            return kwargs
        prompts = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
        reader = PromptReader(self._model, rows, EngineConfig().max_step_tokens)
        tables = reader.read(prompts, [int(n) for n in real[:, :head].sum(dim=1)])
        rows.adopt(tables, head, real[:, :head])
        self._cache.hand_over()
        self.usage = CallUsage(int(real.sum()), reader.cached_tokens)
        cut = {name: kwargs[name][..., head:] for name in call.PER_TOKEN if kwargs.get(name) is not None}
        return {**kwargs, **cut}


def _num_columns(kwargs: Mapping[str, Any]) -> int:
    """Columns of all rows that a call brings, padding included: more cannot be told where it is not understood."""
    brought = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    return 0 if brought is None else int(brought.shape[0] * brought.shape[1])
