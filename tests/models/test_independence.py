"""A model whose tokens look at their neighbours outside attention is refused, whatever its config says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ktransformer2.errors import UnsupportedModelError
from ktransformer2.models.hf import HFModel
from tests.models.tiny import tiny


def hooked(model: PreTrainedModel, module: str, change: Any) -> PreTrainedModel:
    """The model with `change(output)` in place of a submodule's output."""
    model.get_submodule(module).register_forward_hook(lambda _module, _inputs, output: change(output))
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 0.1 * x.roll(1, dims=1),  # a convolution over tokens
        lambda x: x + 0.1 * x.cumsum(dim=1),  # a state
        lambda x: x + torch.linspace(0, 1, x.shape[1])[:, None],  # positions of its own
    ],
)
@pytest.mark.parametrize("module", ["model.embed_tokens", "model.layers.2.mlp", "model.norm"])
def test_tokens_that_see_their_neighbours_are_refused(module: str, change: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="depends on its neighbours"):
        HFModel(hooked(tiny("llama"), module, change))


def test_positions_that_are_not_heard_are_refused() -> None:
    model = tiny("llama")
    rotary: Any = model.get_submodule("model.rotary_emb")
    original = rotary.forward
    rotary.forward = lambda x, position_ids, **more: original(x, torch.arange(x.shape[1])[None], **more)
    with pytest.raises(UnsupportedModelError, match="depends on its neighbours"):
        HFModel(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "mimo_v2_flash", "gpt2"])
def test_rounding_and_experts_are_no_neighbours(family: str, dtype: torch.dtype) -> None:
    HFModel(tiny(family, dtype=dtype))


def test_whatever_a_model_raises_is_one_typed_error() -> None:
    def fail(_output: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no tokens")

    with pytest.raises(
        UnsupportedModelError, match=r"llama cannot compute a row .*ZeroDivisionError: no tokens"
    ) as seen:
        HFModel(hooked(tiny("llama"), "model.norm", fail))
    assert isinstance(seen.value.__cause__, ZeroDivisionError)
