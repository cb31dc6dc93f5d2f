"""A number for what a model would compute: other weights, hooks or adapters, another number.

Reads a few elements of every tensor, so that a call of `generate` can afford it. Knows no cache and no call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator

import torch
from torch.nn.modules import module as torch_module

_NUM_SAMPLES = 8  # of one tensor
# What PEFT's layers say of the adapters that take part; other modules have no such names.
_ADAPTER_NAMES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def model_state(model: torch.nn.Module, own_hook: int) -> bytes:
    """A digest that changes when weights, buffers, hooks, patched `forward`s, modules or PEFT adapters do.

    `own_hook`: the number of a hook that changes nothing. Of every tensor its place, its version (not for tensors made
    in inference mode) and 8 elements, evenly spread, are looked at. Not seen: a write through `.data` that leaves these
    8 as they were; what a hook computes with, when the hook stays; attributes that a module of another package reads.
    """
    places: list[Hashable] = []
    samples: dict[torch.dtype, list[torch.Tensor]] = {}
    # A handle's number is never given twice, the address of a hook may be.
    places.append((*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks))
    with torch.no_grad():
        for module in _modules(model):
            own = module.__dict__
            hooks = (*module._forward_hooks, *(number for number in module._forward_pre_hooks if number != own_hook))
            places.append((id(module), hooks, id(own["forward"]) if "forward" in own else 0))
            if "_active_adapter" in own or "_disable_adapters" in own:
                places.append(repr([own.get(name) for name in _ADAPTER_NAMES]))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    places.append((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version))
                    samples.setdefault(tensor.dtype, []).append(_sample(tensor))
        digest = hashlib.blake2b(repr(places).encode(), digest_size=16)
        for dtype, parts in samples.items():
            digest.update(str(dtype).encode() + torch.cat(parts).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module, in the same order each time; `Module.modules()` takes three times as long."""
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting.extend(module._modules.values())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to 8 elements from the first to the last, one-dimensional."""
    count = tensor.numel()
    if count > 1 and tensor.is_contiguous():
        taken = min(count, _NUM_SAMPLES)
        return tensor.as_strided((taken,), ((count - 1) // max(1, taken - 1),), tensor.storage_offset())
    return tensor[tuple(slice(None, None, max(1, size // 2)) for size in tensor.shape)].flatten()
