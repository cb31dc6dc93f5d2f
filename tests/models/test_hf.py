"""A ragged flat batch through an untouched model equals `generate`; what cannot be exact is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ktransformer2.errors import UnsupportedModelError
from ktransformer2.layout import Form, RopeSpec
from ktransformer2.models.hf import HFModel
from tests.models.paged import PagedTexts, greedy
from tests.models.tiny import FAMILIES, one_by_one, tiny

# Longer than the window of 12, longer than a block of 16, and shorter than both.
PROMPTS = [list(range(3, 44)), [7, 100, 12, 5, 9], [(i * 37) % 200 + 2 for i in range(19)]]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ragged_batch_of_three_equals_generate_one_by_one(family: str) -> None:
    model = tiny(family)
    expected = one_by_one(model, PROMPTS, 12)
    assert len({tuple(answer) for answer in expected}) == 3, "a model that always answers the same proves nothing"
    assert greedy(HFModel(model), PROMPTS, 12) == expected


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_logits_in_chunks_equal_logits_at_once(family: str) -> None:
    model = tiny(family)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits[0, -1]
    served = HFModel(model)
    texts = PagedTexts(served.geometry)
    text = texts.new_text()
    for start in range(0, 41, 13):
        logits = served.forward(texts.step([(text, PROMPTS[0][start : start + 13])]))
    assert logits.shape == (1, served.vocab_size)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0], expected, atol=2e-4, rtol=2e-4)


def test_a_step_may_ask_for_no_logits() -> None:
    served = HFModel(tiny("llama"))
    texts = PagedTexts(served.geometry)
    batch = texts.step([(texts.new_text(), [1, 2, 3])])
    assert served.forward(replace(batch, logit_rows=batch.logit_rows[:0])).shape == (0, served.vocab_size)


def test_geometry_of_a_plain_model() -> None:
    geometry = HFModel(tiny("llama")).geometry
    (group,) = geometry.groups
    assert (group.layers, group.num_kv_heads, group.k_head_size, group.v_head_size) == ((0, 1, 2, 3), 2, 16, 16)
    assert group.window is None
    assert geometry.full_form is Form.FP32
    assert geometry.max_positions == 256
    assert geometry.shift_refused == ""
    assert geometry.rope[0] is not None
    assert geometry.rope[0].rotary_size == 16
    assert not geometry.rope[0].interleaved
    assert geometry.rope[0].inv_freq[0] == 1.0


def test_windows_make_layer_groups() -> None:
    geometry = HFModel(tiny("gemma2")).geometry
    assert [(group.layers, group.window) for group in geometry.groups] == [((0, 2), 12), ((1, 3), None)]


def test_each_layer_kind_keeps_its_own_rope() -> None:
    model = tiny("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2)
    local, full = HFModel(model).geometry.rope
    assert local is not None
    assert full is not None
    assert local.inv_freq[1] > full.inv_freq[1]


def test_partial_interleaved_rope_is_found() -> None:
    (rope,) = HFModel(tiny("glm")).geometry.rope
    assert isinstance(rope, RopeSpec)
    assert rope.rotary_size == 8
    assert rope.interleaved


@pytest.mark.parametrize("family", ["cohere2", "smollm3"])
def test_layers_without_rope_have_their_own_group(family: str) -> None:
    geometry = HFModel(tiny(family)).geometry
    assert geometry.shift_refused == ""
    assert [rope is None for rope in geometry.rope] == [False, True]


def test_heads_of_different_size_and_number_make_groups() -> None:
    geometry = HFModel(tiny("mimo_v2_flash")).geometry
    assert [(g.layers, g.num_kv_heads, g.k_head_size, g.v_head_size, g.window) for g in geometry.groups] == [
        ((0, 2), 1, 24, 16, None),
        ((1, 3), 2, 24, 16, 12),
    ]
    assert [rope and rope.rotary_size for rope in geometry.rope] == [8, 8]


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "dynamic NTK"),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 128,
            },
            "longrope",
        ),
    ],
)
def test_ropes_that_depend_on_the_length_refuse_a_shift(rope: dict[str, Any], reason: str) -> None:
    geometry = HFModel(tiny("llama", rope_parameters=rope)).geometry
    assert reason in geometry.shift_refused
    assert geometry.rope == (None,)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
PHIMOE = {**LONGROPE, "long_factor": [1.0] * 8, "short_mscale": 1.0, "long_mscale": 1.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}


@pytest.mark.parametrize(
    ("family", "settings", "max_positions"),
    [
        ("llama", {"rope_parameters": LONGROPE}, 64),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64),
        ("phimoe", {"rope_parameters": PHIMOE, "num_local_experts": 4}, 64),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}, 64),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_theta": 1e4}}},
            64,
        ),
        ("llama", {"rope_parameters": {**DYNAMIC, "rope_type": "linear"}}, 256),
    ],
)
def test_a_row_as_long_as_allowed_never_meets_another_rotation(
    family: str, settings: dict[str, Any], max_positions: int
) -> None:
    model = tiny(family, **settings)
    served = HFModel(model)
    assert served.geometry.max_positions == max_positions
    longest = [(i * 37) % 200 + 2 for i in range(max_positions - 12)]
    prompts = [longest, *PROMPTS]
    with served.original_attention() as bare:
        expected = one_by_one(bare, prompts, 12)
        if max_positions < 256:  # far past the switch: what this leaves in the model must not reach the next step
            one_by_one(bare, [longest * 2], 12)
    assert greedy(served, prompts, 12) == expected


def test_a_position_past_the_switch_is_never_computed() -> None:
    served = HFModel(tiny("llama", rope_parameters=LONGROPE))
    with pytest.raises(AssertionError, match="position 64 of 64"):
        greedy(served, [[5] * 65], 1)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_fixed_ropes_allow_a_shift(rope: dict[str, Any]) -> None:
    geometry = HFModel(tiny("llama", rope_parameters=rope)).geometry
    assert geometry.shift_refused == ""
    assert geometry.rope[0] is not None


def test_learned_positions_refuse_a_shift() -> None:
    assert "fixed-frequency rotation" in HFModel(tiny("gpt2")).geometry.shift_refused


@pytest.mark.parametrize("size", [12, 264, 512])
def test_head_sizes_that_no_kernel_holds_are_refused(size: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"head size {size}; multiples of 8 up to 256 are served"):
        HFModel(tiny("llama", head_dim=size))


def test_the_largest_head_size_is_served() -> None:
    model = tiny("llama", head_dim=256)
    expected = one_by_one(model, PROMPTS, 6)
    assert greedy(HFModel(model), PROMPTS, 6) == expected


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("deepseek_v3", {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}, "latent attention"),
        ("mamba", {"state_size": 8}, "mamba"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "bloom"),
        ("llama", {"is_causal": False}, "both directions"),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
            "linear_attention",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(family: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        HFModel(tiny(family, **settings))


def test_half_precision_is_refused_on_a_cpu() -> None:
    with pytest.raises(UnsupportedModelError, match="bfloat16 or float32"):
        HFModel(tiny("llama", dtype=torch.float16))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "glm", "cohere2"])
def test_bf16_weights_give_a_bf16_cache(family: str) -> None:
    served = HFModel(tiny(family, dtype=torch.bfloat16))
    assert served.geometry.full_form is Form.BF16
    assert served.geometry.shift_refused == ""


def test_the_original_attention_comes_back_for_generate() -> None:
    model = tiny("llama")
    expected = one_by_one(model, PROMPTS, 4)
    served = HFModel(model)
    with pytest.raises(UnsupportedModelError, match="from a cache of this package"):
        one_by_one(model, PROMPTS, 4)
    with served.original_attention() as bare:
        assert one_by_one(bare, PROMPTS, 4) == expected
        with pytest.raises(AssertionError, match="a step inside original_attention"):
            greedy(served, PROMPTS, 4)
    assert greedy(served, PROMPTS, 4) == expected


def test_fingerprint_changes_with_weights_config_and_dtype() -> None:
    names = [
        HFModel(tiny("llama")).fingerprint,
        HFModel(tiny("llama", seed=1)).fingerprint,
        HFModel(tiny("llama", rms_norm_eps=1e-3)).fingerprint,
        HFModel(tiny("llama", dtype=torch.bfloat16)).fingerprint,
        HFModel(tiny("llama"), weights_hash=b"file").fingerprint,
    ]
    assert len(set(names)) == 5
    assert HFModel(tiny("llama")).fingerprint == names[0]


def test_tied_weights_count_once() -> None:
    tied, untied = HFModel(tiny("llama", tie_word_embeddings=True)), HFModel(tiny("llama", tie_word_embeddings=False))
    assert untied.weight_bytes - tied.weight_bytes == 211 * 64 * 4
