"""What a call of `generate`, and a call of the model inside it, asks for. Decides; changes nothing, knows no cache.

What is not known to be understood is taken for not understood: such a call runs as without the cache, or its tokens
are not remembered.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ktransformer2.integrations.batch_rows import ends_in_padding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_NAMES = ("cache", "past_key_values")
# One column per token, in a call of the model.
PER_TOKEN = ("input_ids", "position_ids", "cache_position")
# Everything in a call of the model that may come beside its tokens and leaves their keys and values as they are.
_HARMLESS = frozenset(
    {*PER_TOKEN, *CACHE_NAMES, "attention_mask", "logits_to_keep", "use_cache", "return_dict"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)
_TENSORS_OF_GENERATE = frozenset({"inputs", "input_ids", "attention_mask", "position_ids"})
# Ways to generate that bring a cache of their own, read more than the last logits, or call the model beside its cache.
_OTHER_WAYS = (
    *("cache_implementation", "custom_generate", "output_attentions", "guidance_scale", "penalty_alpha"),
    *("dola_layers", "assistant_early_exit", "use_mtp", "speculation_type"),
)


def named(generate: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    if not args:
        return dict(kwargs)
    parameters = list(inspect.signature(generate).parameters)
    return {**dict(zip(parameters, args, strict=False)), **kwargs}


def given_cache(values: Mapping[str, Any]) -> Any:
    """The cache that a call brings, whatever its name is; None: none."""
    return next((values[name] for name in CACHE_NAMES if values.get(name) is not None), None)


def setting(model: PreTrainedModel, values: Mapping[str, Any], name: str) -> Any:
    """A setting of `generate`: the call's, else that of its generation_config, else the model's own."""
    if values.get(name) is not None:
        return values[name]
    configs = (values.get("generation_config"), model.generation_config)
    return next((found for config in configs if (found := getattr(config, name, None)) is not None), None)


def with_setting(values: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The call with another setting; a generation_config that was given is copied, not written to."""
    config = values.get("generation_config")
    if config is None or values.get(name) is not None:
        return {**values, name: value}
    config = copy.copy(config)
    setattr(config, name, value)
    return {**values, "generation_config": config}


def leaves_choice(model: PreTrainedModel, values: Mapping[str, Any]) -> bool:
    """Whether this call would fill a cache with the keys of its tokens and read nothing else from it."""
    mask = values.get("attention_mask")
    tensors = {name for name, value in values.items() if isinstance(value, torch.Tensor)}
    return (
        not model.training
        and setting(model, values, "use_cache") is not False
        and not any(setting(model, values, name) for name in _OTHER_WAYS)
        and values.get("assistant_model") is not model
        and tensors <= _TENSORS_OF_GENERATE
        and (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2 and not ends_in_padding(mask)))
    )


def drafts(model: PreTrainedModel, values: Mapping[str, Any]) -> bool:
    """Whether several tokens are proposed at once and verified by their logits."""
    return values.get("assistant_model") is not None or bool(setting(model, values, "prompt_lookup_num_tokens"))


def copies(model: PreTrainedModel, values: Mapping[str, Any]) -> int:
    """Rows that `generate` makes of every row of a prompt."""
    return max(setting(model, values, name) or 1 for name in ("num_beams", "num_return_sequences"))


def prompt_of(values: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(ids, mask) where a call that goes on with a cache brings all its tokens from the first on; else None.

    transformers tells it so: the mask is as long as the ids, or there is none.
    """
    ids = values.get("inputs") if values.get("inputs") is not None else values.get("input_ids")
    mask = values.get("attention_mask")
    if ids is None or (mask is not None and mask.shape[1] != ids.shape[1]):
        return None
    return ids, mask


# --- a call of the model


def columns_kept(model: PreTrainedModel, values: Mapping[str, Any], drafting: bool) -> int | None:
    """How many of the newest columns the model must compute itself: those it is asked about; None: all."""
    for name in ("output_hidden_states", "output_router_logits", "output_attentions"):
        if values.get(name) or (values.get(name) is None and getattr(model.config, name, False)):
            return None
    wanted = values.get("logits_to_keep")
    if isinstance(wanted, int) and wanted > 0:
        return wanted
    return None if drafting or wanted is not None else 1  # `generate` looks at the last one only


def new_columns(values: Mapping[str, Any], num_columns: int) -> torch.Tensor | None:
    """bool [B, T]: the real ones among the columns that a call brings behind `num_columns`.

    None: something beside the tokens decides what their keys and values are.
    """
    ids, mask = values.get("input_ids"), values.get("attention_mask")
    if ids is None or any(name not in _HARMLESS and not _is_nothing(value) for name, value in values.items()):
        return None
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor) or mask.shape != (ids.shape[0], num_columns + ids.shape[1]):
        return None
    return mask[:, num_columns:].to(torch.bool)


def _is_nothing(value: Any) -> bool:
    """Whether an argument says nothing. Models that read images are handed an empty dict where there is none."""
    return value is None or (isinstance(value, Mapping) and not value)


def first_odd_position(
    positions: torch.Tensor | None, real: torch.Tensor, lengths: Sequence[int], num_columns: int
) -> bool:
    """Whether a real token stands elsewhere than behind its row's tokens, `lengths` of them in `num_columns`."""
    counted = torch.tensor(lengths)[:, None] + real.long().cumsum(dim=1) - 1  # [B, T]
    if positions is None:
        positions = torch.arange(num_columns, num_columns + real.shape[1])[None]
    return positions.ndim != 2 or not bool(((positions == counted) | ~real).all())
