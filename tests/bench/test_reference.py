"""The transformers side of the comparisons, on a tiny random model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ktransformer2.bench.reference import HFDecoder, Reference

PROMPT = [5, 9, 2, 40, 17, 3, 3, 60, 8, 21, 33]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


def test_greedy_follows_its_own_logits_and_names_their_margins(model: LlamaForCausalLM) -> None:
    reference = Reference(model)
    run = reference.greedy(PROMPT, 6)
    assert len(run.token_ids) == len(run.margins) == 6
    for i, token in enumerate(run.token_ids):
        before = [*PROMPT, *run.token_ids[:i]]
        assert int(reference.next_logits(before).argmax()) == token
        assert run.margins[i] == pytest.approx(reference.margin(before), abs=1e-5)


def test_the_models_own_generation_config_is_put_back(model: LlamaForCausalLM) -> None:
    before = model.generation_config
    Reference(model).greedy(PROMPT, 2)
    assert model.generation_config is before


def test_spread_is_small_in_fp32_and_never_negative(model: LlamaForCausalLM) -> None:
    assert 0 <= Reference(model).spread(PROMPT * 8) < 1e-4


@pytest.mark.parametrize("way", ["static", "masked", "stock"])
def test_every_way_to_decode_gives_the_same_tokens(model: LlamaForCausalLM, way: str) -> None:
    expected = Reference(model).greedy(PROMPT, 8).token_ids
    decoder = HFDecoder(model, way, max_cache_tokens=64)
    assert decoder.prefill(PROMPT) > 0
    first, second = decoder.decode(3), decoder.decode(3)
    assert len(first) == len(second) == 3
    assert tuple(decoder.token_ids[len(PROMPT) :])[:7] == expected[:7]


@pytest.mark.parametrize("way", ["static", "masked", "stock"])
def test_rows_that_another_has_read_give_the_same_tokens(model: LlamaForCausalLM, way: str) -> None:
    reader, decoder = HFDecoder(model, "stock", 0), HFDecoder(model, way, max_cache_tokens=64)
    reader.prefill(PROMPT)
    decoder.adopt(reader)
    decoder.decode(4)
    reader.decode(4)  # its rows are its own: what the other appended is not there
    num_known = len(PROMPT) + 5  # stock chooses one more, which it does not time
    assert decoder.token_ids[:num_known] == reader.token_ids[:num_known]
