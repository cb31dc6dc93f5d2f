"""What changes the number of a model, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ktransformer2.models.model_state import model_state

Change = Callable[[Any], object]


class Adapted(torch.nn.Linear):
    """As a PEFT layer says which adapters take part."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self._active_adapter, self._disable_adapters, self.scaling = ["one"], False, {"one": 2.0}


def network() -> Any:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), Adapted(), torch.nn.BatchNorm1d(3), torch.nn.Module())
    model[3].register_parameter("odd", torch.nn.Parameter(torch.arange(6.0).view(2, 3).t()))  # not contiguous
    model[3].register_buffer("none", None)
    model[3].register_buffer("large", torch.ones(1000, dtype=torch.bfloat16))
    model[3].register_buffer("far", torch.ones(2, device="meta"))
    model[3].register_buffer("empty", torch.zeros(0))
    model[3].register_buffer("one", torch.tensor(1.0))
    return model


CHANGES: dict[str, Change] = {
    "in place": lambda model: model[0].bias.data.add_(1),
    "past the version": lambda model: model[0].weight.data.copy_(model[0].weight.data * 2),
    "not contiguous": lambda model: model[3].odd.data.mul_(3),
    "scalar": lambda model: model[3].one.data.add_(1),
    "middle": lambda model: model[3].large.data.mul_(2),
    "last element": lambda model: model[1].bias.data[-1].add_(1),
    "buffer": lambda model: model[2].running_mean.data.add_(1),
    "hook": lambda model: model[1].register_forward_hook(lambda *_: None),
    "pre-hook": lambda model: model[1].register_forward_pre_hook(lambda *_: None),
    "module": lambda model: model.__setitem__(0, torch.nn.Linear(4, 3)),
    "forward": lambda model: setattr(model[0], "forward", lambda x: x),
    "adapter off": lambda model: setattr(model[1], "_disable_adapters", True),
    "another adapter": lambda model: setattr(model[1], "_active_adapter", ["two"]),
    "adapter's scale": lambda model: model[1].scaling.update(one=1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_is_seen(change: Change) -> None:
    model = network()
    before = model_state(model, -1)
    assert model_state(model, -1) == before
    kept = change(model)
    assert model_state(model, -1) != before
    del kept


def test_ones_own_hook_is_not_seen_and_a_pass_changes_nothing() -> None:
    model = network()
    before = model_state(model, -1)
    hook = model.register_forward_pre_hook(lambda *_: None)
    assert model_state(model, hook.id) == before
    model[:2](torch.ones(2, 4))
    assert model_state(model, hook.id) == before
