"""What a model would compute, looked at in two ways. Knows no cache and no call.

model_state     a number within this process: other weights, hooks or adapters, another number. Reads a few elements
                of every tensor, so that a call of `generate` can afford it
arrangement     what the tensors alone do not say, for a name that holds in the next process too
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Hashable, Iterator

import torch
from torch.nn.modules import module as torch_module

_RUN = 32  # bytes of a tensor that are read at once: at its middle and at its end
# What PEFT's layers say of the adapters that take part; other modules have no such names.
_ADAPTER_NAMES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def model_state(model: torch.nn.Module, own_hook: int) -> bytes:
    """A digest that changes when weights, buffers, hooks, patched `forward`s, modules or PEFT adapters do.

    `own_hook`: the number of a hook that changes nothing. Of every tensor its place, its version (not for tensors made
    in inference mode) and 64 bytes, half of them amid it and half at its end, are looked at. Not seen: a write through
    `.data` that leaves these as they were; what a hook computes with, when the hook stays; attributes that a module of
    another package reads.
    """
    places: list[Hashable] = []
    samples: list[bytes] = []
    # A handle's number is never given twice, the address of a hook may be.
    places.append((*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks))
    for module in _modules(model):
        own = module.__dict__
        places.append(id(module))
        if module._forward_hooks or module._forward_pre_hooks:
            before = [number for number in module._forward_pre_hooks if number != own_hook]
            if before or module._forward_hooks:
                places.append((before, tuple(module._forward_hooks)))
        if "forward" in own:
            places.append(("forward", id(own["forward"])))
        if "_active_adapter" in own or "_disable_adapters" in own:
            places.append(repr([own.get(name) for name in _ADAPTER_NAMES]))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                place = tensor.data_ptr()
                places.append((place, 0 if tensor.is_inference() else tensor._version))
                samples.append(_sample(tensor, place))
    return hashlib.blake2b(b"".join((repr(places).encode(), *samples)), digest_size=16).digest()


def arrangement(model: torch.nn.Module) -> str:
    """The kinds of all modules, by name, and which PEFT adapters take part in them and how much."""
    parts = []
    for name, module in model.named_modules():
        own, kind = module.__dict__, type(module)
        adapters = [own.get(each) for each in _ADAPTER_NAMES] if "_active_adapter" in own else []
        parts.append(f"{name} {kind.__module__}.{kind.__qualname__} {adapters}")
    return "\n".join(parts)


def program_of_others(model: torch.nn.Module) -> str:
    """The first module whose numbers a hook or a patched `forward` may change, which no hash can name. Empty: none."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "every module has a global hook"
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{where} has a hook"
        if "forward" in module.__dict__:
            return f"the forward of {where} is patched"
    return ""


def _modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module, in the same order each time; `Module.modules()` takes three times as long."""
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting.extend(module._modules.values())


def _sample(tensor: torch.Tensor, place: int) -> bytes:
    """64 bytes of the tensor that begins at `place`, or all where it has fewer. Where it has holes, a few elements.

    Read from memory as they lie: a view of every tensor would take five times as long.
    """
    num_bytes = tensor.nbytes
    if place == 0 or num_bytes == 0 or not tensor.is_cpu:
        return b""
    if not tensor.is_contiguous():
        few = tensor.detach()[tuple(slice(None, None, max(1, size // 2)) for size in tensor.shape)]
        return few.flatten().view(torch.uint8).numpy().tobytes()
    if num_bytes <= 2 * _RUN:
        return ctypes.string_at(place, num_bytes)
    return ctypes.string_at(place + num_bytes // 2 - _RUN, _RUN) + ctypes.string_at(place + num_bytes - _RUN, _RUN)
