"""Random models of many families, with four layers and settings that matter to a test."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ktransformer2.models.tiny import build_random

VOCAB = 211

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 12, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gpt_oss": {"head_dim": 16, "sliding_window": 12, **_MOE},
    "mistral": {"head_dim": 16, "sliding_window": 12},
    "mixtral": {"sliding_window": None, **_MOE},
    "qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "phi3": {},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "cohere2": {"sliding_window": 12},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "olmo2": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {"rotary_pct": 0.25, "num_key_value_heads": None},
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt2": {"n_positions": 256, "n_embd": 64, "n_head": 4, "n_layer": 4},
}


def tiny(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str | None = "eager", **changes: Any
) -> PreTrainedModel:
    """A seeded random model."""
    settings = {**_COMMON, **FAMILIES.get(family, {}), **changes}
    if family == "gpt2":
        settings = {k: v for k, v in settings.items() if k == "vocab_size" or k.startswith("n_")}
    return build_random(AutoConfig.for_model(family, **settings), seed, dtype, attention)


def one_by_one(model: PreTrainedModel, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """What `generate` answers to each prompt alone."""
    answers = []
    generate: Any = model.generate
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers
