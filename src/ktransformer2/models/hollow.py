"""A model of any size without its weights: what its layers hand over can be watched before anything is loaded.

Everything with two or more dimensions is made on the meta device, where it has a shape and no bytes; vectors (norms,
biases, rotary frequencies) are real, and those that would be learnt get made-up values. A product with a weight that is
not there is one with a made-up weight of a single entry a row: `y[j] = +-x[j + shift]`, round and round. It costs a
copy, it never mixes rows, and a row's result depends on that row alone, so head sizes, windows, masks, rotations and
the independence of rows come out as with the weights themselves.

Knows no file. Invariant: what a hollow model computes is real wherever an activation takes part in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ktransformer2.errors import ModelFileError, UnsupportedModelError
from ktransformer2.models.registry import quiet_transformers

_Functions = frozenset[Callable[..., Any]]
_FACTORIES: _Functions = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full})
_INTEGERS = (torch.int32, torch.int64)
_ROWS_BY_INDEX: _Functions = frozenset({torch.nn.functional.embedding, torch.Tensor.__getitem__, torch.index_select})
_GROUPED: tuple[Callable[..., Any], ...] = (torch.nn.functional.grouped_mm, torch._grouped_mm)
_NUM_ROWS = 61


def hollow_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal model of `config` as loading in `dtype` would make it, without weights. `config` is left as it is.

    Raises ModelFileError where transformers cannot make the model.
    """
    auto: Any = AutoModelForCausalLM
    try:
        with quiet_transformers(), _Unallocated():
            model: PreTrainedModel = auto.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    except Exception as error:  # whatever a senseless config makes a model's own code stumble over
        raise ModelFileError(
            f"a model of type {config.model_type} cannot be made from its config ({type(error).__name__}: {error})"
        ) from error
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:  # a norm of equal scales would commute with a rotation, a learnt one does not
                parameter.add_(torch.sin(torch.arange(parameter.numel())).view_as(parameter), alpha=0.1)
    return model


class _Unallocated(TorchFunctionMode):
    """Tensors of two or more dimensions are made without memory; so is their initialisation."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _FACTORIES:
            shape = keywords.get("size", args[0] if args else ())
            if isinstance(shape, int):
                shape = args
            if len(shape) >= 2 and keywords.get("dtype") not in _INTEGERS:  # those are positions and the like
                keywords["device"] = "meta"
        return func(*args, **keywords)


class HollowArithmetic(TorchFunctionMode):
    """Inside the block a hollow model computes.

    Raises UnsupportedModelError for an operation that it cannot stand in for.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        tensors = list(_tensors((*args, *keywords.values())))
        hollow = [tensor for tensor in tensors if tensor.is_meta]
        if not hollow:
            return func(*args, **keywords)
        if func is torch.Tensor.__int__:  # which of the weights is largest: any will do
            return 0
        given = [tensor for tensor in tensors if not tensor.is_meta and tensor.ndim]
        if not given:
            return func(*args, **keywords)
        by_index = func in _ROWS_BY_INDEX and not any(tensor.is_floating_point() for tensor in given)
        if by_index and hollow[0].ndim > 2:  # a choice of experts: still a weight
            return func(*_on_meta(args), **_on_meta(keywords))
        shape, dtype = _result(func, args, keywords, hollow[0], given)
        if by_index:
            return _rows_of(given[0], shape).to(dtype)
        return _mapped(max((t for t in given if t.is_floating_point()), key=lambda t: t.ndim), shape).to(dtype)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, in lists of them too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _on_meta(values: Any) -> Any:
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, values)


def _result(
    func: Callable[..., Any], args: Any, keywords: Any, weight: torch.Tensor, given: list[torch.Tensor]
) -> tuple[torch.Size, torch.dtype]:
    """Shape and type of what `func` would give."""
    if func in _GROUPED:  # [T, in] by [E, in, out]; its shape rule on meta takes bfloat16 only
        return torch.Size((*given[0].shape[:-1], weight.shape[-1])), given[0].dtype
    out = func(*_on_meta(args), **_on_meta(keywords))
    if not (isinstance(out, torch.Tensor) and out.is_floating_point() and out.ndim):
        raise UnsupportedModelError(f"{getattr(func, '__name__', func)} of a weight cannot be told before loading")
    return out.shape, out.dtype


def _mapped(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Each row of `x` through the made-up weight, in `shape`."""
    size, wanted = x.shape[-1], shape[-1]
    shift = (wanted + 1) % size
    tiles = [1] * (x.ndim - 1) + [-(-(shift + wanted) // size)]
    signs = 1 - 2 * (torch.arange(wanted) % 3 % 2)  # +, -, +, +, -, + ...
    mapped = x.repeat(tiles)[..., shift : shift + wanted] * signs.to(x.dtype)
    try:
        return mapped.broadcast_to(shape).contiguous()
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"a weight turns {tuple(x.shape)} into {tuple(shape)}: what that computes cannot be told before loading"
        ) from error


def _rows_of(ids: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A made-up table's row for every id: other ids have other rows, none is zero."""
    channels = torch.arange(1, shape[-1] + 1)
    return torch.sin(0.37 * (ids.reshape(*ids.shape, 1) % _NUM_ROWS + 1) * channels).broadcast_to(shape)
