"""A small random model of any causal architecture that transformers knows: its structure kept, every size shrunk.

What a config calls its sizes is shrunk by name; of its layers those are kept that differ in kind; windows are short, so
that a test passes them. Nothing is downloaded. Knows no cache and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ktransformer2.errors import ModelError
from ktransformer2.models.registry import quiet_transformers

VOCAB_SIZE = 211
WINDOW = 16
MAX_POSITIONS = 256
_MAX_LAYERS = 4
# What configs call the same thing. A number in front: the largest that a size may be.
_NAMES = """
layers num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers
layers num_layers_per_stack
window sliding_window sliding_window_size window_size local_attention attention_window_size attention_chunk_size
window keep_window_size floor_scale log_scaling_n_floor
head   head_dim global_head_dim swa_head_dim dim_head d_head attention_head_size kv_channels
256 max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions context_length
256 model_max_length
211 vocab_size vocab_size_per_layer_input audio_vocab_size pronunciation_vocab_size shape_vocab_size output_vocab_size
211 encoder_hash_byte_group_vocab
96  intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size dim_ff dff d_inner
96  intermediate_size_mlp dense_intermediate_size feed_forward_size
64  hidden_size d_model n_embd embedding_dim emb_dim embedding_size word_embed_proj_dim input_embedding_size
64  adapter_in_dim adapter_out_dim adapter_input_size output_embedding_size ple_embed_dim hc_lowrank lru_width
64  pronunciation_embed_dim shape_embed_dim original_max_position_embeddings
32  moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size
32  expert_ffn_hidden_size moe_shared_expert_intermediate_size prefix_dense_intermediate_size patch_size image_size
16  v_head_dim attention_head_dim d_kv index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim
16  qk_nope_head_dim q_lora_rank kv_lora_rank hidden_size_per_layer_input rel_extent chunk_size mamba_chunk_size
16  block_size index_block_size query_pre_attn_scalar
8   qk_rope_head_dim rotary_dim o_lora_rank d_rel
5   attn_logit_softcapping
4   num_attention_heads n_head n_heads attention_heads num_heads encoder_attention_heads decoder_attention_heads
4   swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_heads
4   linear_num_value_heads num_experts num_local_experts n_routed_experts moe_num_experts index_topk
2   num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads linear_num_key_heads index_n_heads
2   num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts index_topk_blocks
1   n_group topk_group num_expert_group first_k_dense_replace
"""
_KIND_OF = {name: kind for kind, *names in map(str.split, _NAMES.strip().split("\n")) for name in names}
_HEAD_SIZE = 16
# Larger heads are left as they are: whether they can be served is part of what a tiny model shows.
_LARGEST_HEAD_TO_SHRINK = 256
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_FIXED: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "use_sliding_window": True,
}

# Without these a default config is refused by its own checks.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
# What the rules above cannot know: settings that the defaults leave out, sizes that depend on each other, and layer
# kinds that every published model has but the default config has not.
_SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "laguna": {"num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1], "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "ministral": {"head_dim": 16},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16], "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
}


def causal_architectures() -> dict[str, str]:
    """Model type -> class name, of everything that `AutoModelForCausalLM` makes in this transformers."""
    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The architecture's default config, shrunk. Raises ModelError where transformers cannot make it."""
    with _made_by_transformers(model_type):
        changes = _shrunk(AutoConfig.for_model(model_type, **_DEFAULTS.get(model_type, {})))
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **_merged(changes, _SPECIAL.get(model_type, {})))
    return config


def build_random(
    config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> PreTrainedModel:
    """A model of `config` with seeded weights so large that heads, experts and positions differ.

    Side effect: torch's generator is seeded. Raises ModelError where transformers cannot make it.
    """
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    with _made_by_transformers(config.model_type), quiet_transformers():
        model: PreTrainedModel = auto.from_config(config, attn_implementation=attention).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif name.endswith("sinks"):
                parameter.normal_(mean=1.0, std=1.0)
            else:  # scales around 1 and biases around 0 stay where they are
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@contextmanager
def _made_by_transformers(model_type: str) -> Iterator[None]:
    """One typed error for whatever the code of an architecture raises: its own checks, a missing package."""
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"transformers cannot make a small {model_type} ({type(error).__name__}: {str(error).strip()[:200]})"
        ) from error


def _merged(changes: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """`special` over `changes`, in nested configs too."""
    merged = dict(changes)
    for name, value in special.items():
        nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if nested else value
    return merged


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings that make a config small. Nested configs become dicts of their own changes."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = {"model_type": value.model_type, **_shrunk(value)}
        elif name == "rope_parameters" and value:
            changes[name] = _small_rope(value)
        elif name in _FIXED:
            changes[name] = _FIXED[name]
        elif ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            changes[name] = 0.0
        elif (small := _small(name, value)) is not None:
            changes[name] = small
    return {**changes, **_fewer_layers(values)}


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """A rope description, or one per layer kind, whose switches lie inside a small model's positions."""
    return {
        name: _small_rope(value) if isinstance(value, dict) else _small(name, value) or value
        for name, value in rope.items()
    }


def _small(name: str, value: object) -> float | None:
    """A setting's small value; None: it is not a size."""
    kind = _KIND_OF.get(name, "")
    if kind == "window":  # also where the default is None: a window that may be there must be served
        return WINDOW
    if name == "num_key_value_heads" and value is None:  # means as many as query heads; fewer show more
        return int(kind)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if kind == "head":
        return _HEAD_SIZE if value <= _LARGEST_HEAD_TO_SHRINK else value
    return type(value)(min(value, int(kind))) if kind.isdigit() else None


def _fewer_layers(values: dict[str, Any]) -> dict[str, Any]:
    """Layer counts and per-layer lists, cut down to the first layer of every kind; at least two layers."""
    counts = [name for name in values if _KIND_OF.get(name) == "layers" and type(values[name]) is int]
    if not counts:
        return {}
    num_layers = values[counts[0]]
    lists = {k: list(v) for k, v in values.items() if isinstance(v, (list, tuple)) and len(v) == num_layers > 1}
    seen: set[tuple[str, str]] = set()
    kept: list[int] = []
    for layer in range(num_layers):
        kinds = {(name, repr(entries[layer])) for name, entries in lists.items()}
        if not kinds <= seen and len(kept) < _MAX_LAYERS:
            kept.append(layer)
            seen |= kinds
    kept += [layer for layer in range(num_layers) if layer not in kept][: max(0, 2 - len(kept))]
    changes: dict[str, Any] = {name: [entries[layer] for layer in sorted(kept)] for name, entries in lists.items()}
    changes |= dict.fromkeys(counts, len(kept))
    has_windows = any(_KIND_OF.get(name) == "window" for name in values)
    if has_windows and changes.get("layer_types") in (["full_attention"] * 2, ["sliding_attention"] * 2):
        changes["layer_types"] = ["sliding_attention", "full_attention"]  # the architecture has both
    return changes
