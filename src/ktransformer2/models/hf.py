"""Any causal model of transformers, untouched, stepped on one flat batch. Knows no request and no block's life.

A step is one row of tokens from many sequences. Everything in a decoder but attention works token by token, so the row
needs no padding and no mask; attention goes to the kernels, which know where each sequence begins.

Invariants: the model is never trained and never copied; K and V leave it only through the KVBatch of the running step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ktransformer2.errors import ConfigError, UnsupportedModelError
from ktransformer2.kernels.attention import paged_attention, seal, store_kv
from ktransformer2.kernels.batch import AttentionParams, KVBatch
from ktransformer2.layout import ModelGeometry
from ktransformer2.models.batch import FlatBatch
from ktransformer2.models.fingerprint import fingerprint, hash_tensors
from ktransformer2.models.independence import can_choose_logits
from ktransformer2.models.model_state import model_state, program_of_others
from ktransformer2.models.probe import observe, refuse_unservable, text_config
from ktransformer2.models.registry import ATTENTION_NAME, LayerCall, lent, quiet_transformers, receiving, register

NO_HOOK = -1  # no hook of a model's has this number


class StepAttention:
    """A receiver that stores keys and values into the step's pages and attends over them."""

    def __init__(self, geometry: ModelGeometry, kv: tuple[KVBatch, ...]) -> None:
        self.geometry = geometry
        self._kv = kv

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group, column = self.geometry.layer_place[call.layer]
        batch = self._kv[group]
        store_kv(k, v, batch, column)
        seal(k, v, batch, column)
        params = AttentionParams(
            scale=call.scale,
            window=self.geometry.groups[group].window,
            softcap=call.softcap,
            sinks=call.sinks,
            rope=self.geometry.rope[group],
        )
        return paged_attention(q, k, v, batch, column, params)

    def mask(self, request: Mapping[str, Any]) -> None:
        """Masks were compared with the windows when the model was taken in."""


class HFModel:
    """A CausalModel around a transformers model.

    Side effect: the model's attention is the registered one from now on; see `original_attention`.
    Raises UnsupportedModelError, naming the reason, for what cannot be served exactly.
    `weights_hash` names the content of the weights; None: the tensors are hashed.
    """

    runner = "transformers"  # whose forward pass a step is
    weights: str = "dense"  # the form of its weights

    def __init__(self, model: PreTrainedModel, weights_hash: bytes | None = None) -> None:
        refuse_unservable(model.config)
        if model.dtype == torch.float16 and model.device.type == "cpu":
            raise UnsupportedModelError(
                "float16 arithmetic is hundreds of times slower than float32 on a CPU; load with bfloat16 or float32"
            )
        self.model = model
        model.train(False)
        self._own_attention: str = _attention_of(model)
        self.vocab_size: int = _vocab_size(model)
        _use_registered_attention(model)
        self.geometry: ModelGeometry = observe(model)
        # GPT-OSS and others keep some weights in fp32: the config's dtype and the tensors' hash cover that.
        self._from_files = weights_hash is not None
        weights = hash_tensors(model) if weights_hash is None else weights_hash
        self.fingerprint: bytes = fingerprint(model.config, self.geometry, model.dtype, weights)
        self.weight_bytes: int = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
        self._keeps_logits = can_choose_logits(model)
        self._state = model_state(model, NO_HOOK)

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """Logits fp32 [N, vocab_size] of `batch.logit_rows`. Side effect: K and V are stored in every layer."""
        assert len(batch.kv) == len(self.geometry.groups), (
            f"{len(batch.kv)} batches, {len(self.geometry.groups)} groups"
        )
        attention = _attention_of(self.model)
        assert attention == ATTENTION_NAME, f"a step inside original_attention(): {attention!r} knows no pages"
        if self.geometry.shift_refused:  # elsewhere a shift may move positions past the context length
            last, end = int(batch.positions.max()), self.geometry.max_positions
            assert last < end, f"position {last} of {end}: the rotation of the whole row would change"
        rows = batch.logit_rows
        wanted = {"logits_to_keep": rows} if self._keeps_logits else {}
        with torch.inference_mode(), receiving(StepAttention(self.geometry, batch.kv)):
            logits: torch.Tensor = self.model(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **wanted
            ).logits[0]  # [N, vocab], or [T, vocab] from a model that cannot choose
        return (logits if self._keeps_logits else logits[rows]).float()

    def up_to_date(self) -> HFModel:
        """What computes the model as it is now, with the adapters and weights that came since it was taken in."""
        return self

    def lasting_fingerprint(self) -> bytes:
        """`fingerprint` for blocks that outlive the process; anew where the model was changed since it was taken in.

        Cost: some milliseconds; of a changed model, a pass over its weights.
        Raises: ConfigError for a model that others have hooked into or patched: its numbers have no name.
        """
        is_as_it_came = model_state(self.model, NO_HOOK) == self._state
        if self._from_files and is_as_it_came:
            return self.fingerprint
        if reason := program_of_others(self.model):
            raise ConfigError(
                f"nothing of this model can be kept for the next process: {reason}, and what that computes the weights "
                "do not tell. Take it off before, or leave persist and valkey_url out"
            )
        if is_as_it_came:
            return self.fingerprint
        return fingerprint(self.model.config, self.geometry, self.model.dtype, hash_tensors(self.model))

    @contextmanager
    def registered_attention(self) -> Iterator[None]:
        """The registered attention inside the block, whatever was set before, for a model that is not ours to keep.

        Calls of the model in other threads meanwhile have its own: `plain_attention_name`.
        """
        before: str = _attention_of(self.model)
        with lent(text_config(self.model.config), self.plain_attention_name):
            _use_registered_attention(self.model)
            try:
                yield
            finally:
                self.model.set_attn_implementation(before)

    @property
    def plain_attention_name(self) -> str:
        """The attention that the model came with; where that is the registered one, what transformers has for it."""
        if self._own_attention != ATTENTION_NAME:
            return self._own_attention
        softcap = getattr(text_config(self.model.config), "attn_logit_softcapping", None)  # which SDPA may drop
        return "sdpa" if self.model._supports_sdpa and softcap is None else "eager"

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """An attention of transformers' own inside the block, for calls that know nothing of this package: where the
        registered one is set, that of `plain_attention_name`."""
        before = _attention_of(self.model)
        if before == ATTENTION_NAME:
            self.model.set_attn_implementation(self.plain_attention_name)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def restore(self) -> None:
        """Give the model the attention back that it came with."""
        self.model.set_attn_implementation(self._own_attention)

    @contextmanager
    def original_attention(self) -> Iterator[PreTrainedModel]:
        """The bare model with the attention it came with, for `generate()`; no step may run meanwhile."""
        self.model.set_attn_implementation(self._own_attention)
        try:
            yield self.model
        finally:
            _use_registered_attention(self.model)


def cache_keyword(model: PreTrainedModel) -> str:
    """What the model calls its cache: transformers renamed `past_key_values` to `cache` in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _attention_of(model: PreTrainedModel) -> str:
    """The name of the attention that the decoder's layers use; an image tower beside it may have another."""
    name: str = text_config(model.config)._attn_implementation
    return name


def _use_registered_attention(model: PreTrainedModel) -> None:
    register()
    with quiet_transformers():  # it only warns where it should refuse; the check below refuses
        model.set_attn_implementation(ATTENTION_NAME)
    if _attention_of(model) != ATTENTION_NAME:
        raise UnsupportedModelError(
            f"{model.config.model_type} does not take its attention from the transformers registry"
        )


def _vocab_size(model: PreTrainedModel) -> int:
    head: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # unannotated there
    if head is None:
        raise UnsupportedModelError(f"{model.config.model_type} has no output embeddings: it answers no tokens")
    return head.get_parameter("weight").shape[0]
