"""Where transformers hands over queries, keys and values: one attention and one mask function under one name.

transformers keeps process-wide registries, so these functions are global; what they do with a call is decided by the
`Receiver` that surrounds the model's forward pass (a context variable: keyword arguments get lost in some models), or,
where a cache handed the layer `PagedRows` in place of keys and values, by those.
transformers makes no masks for an attention name it has no mask function for; ours is registered so that every mask
a model would have used is seen, and answers None: windows and causality are the kernel's work.

Knows no page and no geometry. Invariant: a keyword that is not understood raises, it is never dropped.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from logging import ERROR
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ktransformer2.errors import UnsupportedModelError

ATTENTION_NAME = "ktransformer2"

# Keywords that say nothing about attention itself: models pass on whatever they were given.
_IGNORED = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
# Keywords that must be switched off: None, False or 0.
_MUST_BE_OFF = frozenset({"dropout", "output_attentions"})
_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal", "attention_mask"})


@dataclass(frozen=True)
class LayerCall:
    """One layer's call. `window` means something only where `window_given`: some models leave it to their mask."""

    layer: int
    scale: float
    window: int | None
    window_given: bool
    softcap: float | None
    sinks: torch.Tensor | None


class Receiver(Protocol):
    """Takes what a model hands over during one forward pass."""

    def attend(self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, Dk], k [T, G, Dk], v [T, G, Dv] -> [T, H, Dv]. Views: only the last dimension is contiguous."""
        ...

    def mask(self, request: Mapping[str, Any]) -> None:
        """Sees the keywords of one mask that the model asks for."""
        ...


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings of transformers inside the block: what they warn of is checked by us."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated


class PagedRows:
    """What a cache hands to a layer in place of keys and values: rows that are placed when their queries come.

    It reaches `attention` untouched; a layer that does anything else with it is told what to do.
    """

    def attend(self, call: LayerCall, query: torch.Tensor) -> torch.Tensor:
        """Attention of query [B, H, T, Dk] over the cache, with these rows stored first: [B, T, H, Dv]."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModelError(
            f"a layer asked its cached keys or values for .{name}: it computes attention outside the transformers "
            'registry; load the model with attn_implementation="sdpa"'
        )


class MaskReader(Protocol):
    """Sees the mask that a model asks for behind a cache."""

    def mask(self, request: Mapping[str, Any]) -> None: ...


_receiver: ContextVar[Receiver | None] = ContextVar("ktransformer2_receiver", default=None)


@contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """Every attention call of this thread goes to `receiver` until the end of the block."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


_mask_reader: ContextVar[weakref.ref[MaskReader] | None] = ContextVar("ktransformer2_mask_reader", default=None)


def read_next_mask(reader: MaskReader) -> None:
    """The next mask this thread's model asks for goes to `reader`: transformers tells a mask function of no cache."""
    _mask_reader.set(weakref.ref(reader))


_lent: dict[int, str] = {}  # the attention of their own of models that are attached, by the id of a config that lives


@contextmanager
def lent(config: PreTrainedConfig, own_attention: str) -> Iterator[None]:
    """Inside the block the model of this config has the registered attention, from which calls of other threads fall
    through to its own."""
    before = _lent.get(id(config))
    _lent[id(config)] = own_attention
    try:
        yield
    finally:
        if before is None:
            del _lent[id(config)]
        else:
            _lent[id(config)] = before


def _own_attention(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The attention of transformers' own that the layer of a lent model has; None: it is not lent."""
    name = _lent.get(id(getattr(module, "config", None)))
    if name is None:
        return None
    eager: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS.get(name, eager)


def _current() -> Receiver:
    receiver = _receiver.get()
    if receiver is None:
        raise UnsupportedModelError(
            f"attention {ATTENTION_NAME!r} reads its keys and values from a cache of this package: pass a "
            "DynamicKVCache, call generate() inside ktransformer2.attach(model), or give the model its own attention "
            'back with model.set_attn_implementation("sdpa"). Phi-3 and its kin put a cache aside where a text passes '
            "original_max_position_embeddings: attach the model then"
        )
    return receiver


def _refuse_unknown(name: str, keywords: Mapping[str, Any]) -> None:
    for key, value in keywords.items():
        if value is None or key in _IGNORED:
            continue
        if key in _MUST_BE_OFF:
            if value:
                raise UnsupportedModelError(f"{name} asks for {key}={value!r}, which is not served")
        elif key not in _UNDERSTOOD:
            raise UnsupportedModelError(f"{name} passes the attention argument {key!r}, which is not understood")
    if keywords.get("is_causal") is False:
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models can be cached")
    if keywords.get("attention_mask") is not None:
        raise UnsupportedModelError(f"{name} builds an attention mask of its own, which is not served")


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | PagedRows,
    value: torch.Tensor | PagedRows,
    attention_mask: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function that transformers calls: [1, H, T, Dk], [1, G, T, Dk], [1, G, T, Dv] -> [1, T, H, Dv].

    With `PagedRows` in place of keys and values a batch of any size is served. A call of a lent model that brings
    tensors while nobody receives is another thread's: its own attention answers.

    Raises UnsupportedModelError for a keyword it does not understand and for a module that is not a causal layer.
    """
    name = type(module).__name__
    own = None if isinstance(key, PagedRows) or _receiver.get() is not None else _own_attention(module)
    if own is not None:
        found: tuple[torch.Tensor, torch.Tensor | None] = own(module, query, key, value, attention_mask, **keywords)
        return found
    _refuse_unknown(name, {"attention_mask": attention_mask, **keywords})
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models can be cached")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModelError(f"{name} does not say which layer it is (no layer_idx)")
    scale, softcap, sinks = keywords.get("scaling"), keywords.get("softcap"), keywords.get("s_aux")
    call = LayerCall(
        layer=int(layer),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=keywords.get("sliding_window"),
        window_given="sliding_window" in keywords,
        softcap=float(softcap) if softcap else None,
        sinks=None if sinks is None else sinks.detach().float(),
    )
    if isinstance(key, PagedRows):
        return key.attend(call, query), None
    receiver = _current()
    if query.shape[0] != 1:
        raise UnsupportedModelError(f"{name} was called with a batch of {query.shape[0]} rows; one flat row is allowed")
    assert isinstance(value, torch.Tensor), f"keys are a tensor, values are {type(value).__name__}"
    # [1, H, T, D] -> [T, H, D]; for most models this is how the projection wrote it, so nothing is copied.
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    return receiver.attend(call, q, k, v).unsqueeze(0), None  # [1, T, H, Dv]


def mask(**request: Any) -> Any:
    """The mask function that transformers calls. There is no mask, but for another thread's call of a lent model."""
    waiting = _mask_reader.get()
    _mask_reader.set(None)
    reader = waiting() if waiting is not None else None
    receiver = _receiver.get()
    if receiver is None and reader is None and (name := _lent.get(id(request.get("config")))) is not None:
        return ALL_MASK_ATTENTION_FUNCTIONS[name](**request)
    (reader if reader is not None and receiver is None else _current()).mask(request)
    return None


def register() -> None:
    """Makes `ATTENTION_NAME` known to transformers. Side effect: process-wide registries; twice is harmless."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)
