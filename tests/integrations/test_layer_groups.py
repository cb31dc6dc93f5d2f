"""Every causal architecture of transformers behind the drop-in: equal answers, or refused by a typed error.

What docs/models.md calls served is served here too, paged and gathered, and its config describes what its layers hand
over; the exceptions are named.
"""

from __future__ import annotations

import copy
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ktransformer2.errors import ModelError, UnsupportedModelError
from ktransformer2.integrations.layer_groups import described_groups
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.layout import LayerGroup
from ktransformer2.models.hf import HFModel, cache_keyword
from ktransformer2.models.probe import text_config
from ktransformer2.models.registry import ATTENTION_NAME, quiet_transformers
from ktransformer2.models.tiny import build_random, causal_architectures, tiny_config
from tests.integrations.answers import Inputs, assert_same, draw, generated

# JetMoE repeats its cached heads before it attends: pages cannot be read in place, a gathered copy can.
GATHERED_ONLY = ("jetmoe",)
# Of one version of transformers; on others the table is not compared.
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SETTINGS = {"max_new_tokens": 4, "min_new_tokens": 4}


def by_layer(groups: tuple[LayerGroup, ...]) -> dict[int, tuple[int, int, int, int | None]]:
    return {
        layer: (group.num_kv_heads, group.k_head_size, group.v_head_size, group.window)
        for group in groups
        for layer in group.layers
    }


@cache
def served_by_the_engine() -> frozenset[str]:
    """Model types of the page's table of what is served."""
    page = PAGE.read_text()
    table = page.partition("## Served")[2].partition("## Refused")[0]
    return frozenset(re.findall(r"^\| ([a-z0-9_.-]+) \|", table, re.MULTILINE)) - {"model"}


def outcome(model_type: str) -> str:
    """served, or why not: refused, not made, no cache, no answer. Whatever else goes wrong fails the test."""
    with quiet_transformers():
        try:
            config = tiny_config(model_type)
            cache_of(config)
            # Older transformers let SDPA drop a softcap without a word.
            softcap = getattr(text_config(config), "attn_logit_softcapping", None)
            model = build_random(config, attention="eager" if softcap else None)
        except (ModelError, UnsupportedModelError) as error:
            return f"not made: {error}"
        if cache_keyword(model) not in inspect.signature(model.forward).parameters:
            return "keeps no cache in transformers either"
        if not answers_at_all(model):
            return "does not answer in transformers either"
        gathered, reference = takes(model, model), copy.deepcopy(model)
        try:
            served = HFModel(model, weights_hash=bytes(32))
        except UnsupportedModelError as error:
            return f"refused: {error}"
        assert gathered
        assert takes(model, reference) == (model_type not in GATHERED_ONLY)
        if model_type not in GATHERED_ONLY:
            assert by_layer(described_groups(config)) == by_layer(served.geometry.groups)
        return "served"


def built(model_type: str) -> PreTrainedModel:
    with quiet_transformers():
        return build_random(tiny_config(model_type))


def cache_of(config: PreTrainedConfig) -> DynamicKVCache:
    return DynamicKVCache(config, kv="full", memory="64MB", block_tokens=16)


def takes(model: PreTrainedModel, reference: PreTrainedModel) -> bool:
    """Whether the drop-in takes the model; False: a typed error. Answers that differ fail the test."""
    try:
        assert_same(
            lambda inputs: generated(model, inputs, cache_of(model.config), **SETTINGS),
            reference,
            two_rows,
            **SETTINGS,
        )
    except UnsupportedModelError:
        return False
    return True


def two_rows(seed: int) -> Inputs:
    return draw(2, 20, seed, pads=(0, 3))


def answers_at_all(model: PreTrainedModel) -> bool:
    try:
        generated(model, two_rows(0), **SETTINGS)
    except (IndexError, RuntimeError):  # of a model whose small config transformers makes and cannot run
        return False
    return True


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("model_type", sorted(causal_architectures()))
def test_every_architecture_is_served_or_refused(model_type: str) -> None:
    found = outcome(model_type)
    if transformers.__version__ in PAGE.read_text().partition("\n## ")[0]:
        assert (found == "served") == (model_type in served_by_the_engine()), found


def test_a_model_that_puts_its_cache_aside_is_told_what_to_do() -> None:
    model = built("phi3")  # where a text passes 64 tokens
    with quiet_transformers():
        model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(UnsupportedModelError, match="Phi-3 and its kin put a cache aside"):
        generated(model, draw(1, 60), cache_of(model.config), max_new_tokens=8, min_new_tokens=8)
