"""Whether a loaded transformers model is exactly the decoder that `llama` computes. What is unusual is not guessed at.

Families: Llama (SmolLM and SmolLM2 among them), Mistral, Qwen2 and Qwen3. Looks at the modules that were made, not only
at what the config says of them. Knows no cache and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

_CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Whose frequencies are one table for all positions; transformers' own function made it.
_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
_PLAIN_MODULES = {nn.Linear, nn.Embedding, nn.ModuleList}
_GATES = {nn.SiLU, type(ACT2FN["silu"])}
_DTYPES = {torch.float32, torch.bfloat16}


def unfit(model: PreTrainedModel) -> str:
    """Why the lean runner does not compute this model; empty: it does."""
    if any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return misfit(model) or "not all of it lies in host memory"
    return misfit(model)


def misfit(model: PreTrainedModel) -> str:
    """`unfit`, wherever its tensors lie: of a hollow model too."""
    return next(_reasons(model), "")


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    kind, config = type(model), model.config
    home = kind.__module__
    if kind.__name__ not in _CLASSES or not home.startswith("transformers.models."):
        yield f"{kind.__name__} is none of {', '.join(sorted(_CLASSES))}"
        return
    yield from _config_reasons(config)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1 or not dtypes <= _DTYPES:
        yield f"its weights are {', '.join(sorted(map(str, dtypes)))}"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        yield "a hook was registered for all modules"
    for name, module in model.named_modules():
        ours = type(module).__module__ == home or type(module) in _PLAIN_MODULES
        if not (type(module) in _GATES if name.endswith("mlp.act_fn") else ours):
            yield f"{name} is a {type(module).__name__}"
        elif "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            yield f"{name or 'the model'} was given another forward pass"
    decoder: Any = model.model  # transformers leaves its modules' attributes untyped
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            if len({projection.bias is None for projection in group}) > 1:
                yield "some projections that are fused have a bias, others have none"


def _config_reasons(config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "is_heterogeneous", False):
        yield "its layers differ"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantised"
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        yield f"pretraining_tp={config.pretraining_tp}"
    if config.hidden_act != "silu":
        yield f"hidden_act={config.hidden_act}"
    rope = config.rope_parameters or {}
    if rope.get("rope_type") not in _FIXED_ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"rope {rope.get('rope_type')}"
    if "mrope_section" in rope:
        yield "M-RoPE"
