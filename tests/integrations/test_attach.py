"""A model with a cache attached answers as the bare model does, call after call, and is the bare model again."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, pipeline

from ktransformer2.errors import ConfigError, EngineClosedError, OutOfMemoryError, UnsupportedModelError
from ktransformer2.integrations.attach import Attachment, CallUsage, attach
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.models.demo import byte_tokenizer
from ktransformer2.models.hf import cache_keyword
from ktransformer2.models.registry import ATTENTION_NAME
from tests.integrations.answers import (
    BLOCK,
    FOUR_BEAMS,
    NUM_NEW,
    SAMPLED,
    Inputs,
    assert_same,
    draw,
    gathering,
    generated,
    shared,
    small,
)
from tests.models.tiny import VOCAB

FAMILIES = ("llama", "gemma2", "gpt_oss")


def attached(model: PreTrainedModel, **knobs: Any) -> Attachment:
    return attach(model, **{"kv": "full", "memory": "64MB", "block_tokens": BLOCK, **knobs})


def settings_of(**settings: Any) -> GenerationConfig:
    return GenerationConfig.from_dict({"do_sample": False, "pad_token_id": 0, **settings})


def asked(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What `generate` answers to just these arguments."""
    answer: torch.Tensor = model.generate(*args, **kwargs)
    return answer


def assert_nothing_is_held(held: Attachment) -> None:
    held.cache.check_integrity()
    stats = held.stats()
    assert stats.num_cached_blocks == stats.num_blocks


def assert_as_it_came(model: PreTrainedModel, attention: str) -> None:
    assert model.config._attn_implementation == attention
    assert "generate" not in vars(model)
    assert not model._forward_pre_hooks


@pytest.fixture
def llama() -> Iterator[PreTrainedModel]:
    model = small("llama", attention="sdpa")
    yield model
    assert_as_it_came(model, "sdpa")


# --- the same answers, and what was cached


@pytest.mark.parametrize("settings", [{}, SAMPLED, FOUR_BEAMS], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cold_and_warm_answer_as_the_bare_model(family: str, settings: dict[str, Any]) -> None:
    model = small(family, attention=gathering(family))
    with attached(model) as held:
        for warm in (False, True):
            assert_same(lambda inputs: generated(model, inputs, **settings), shared(family), **settings)
            rows = 4 if settings is FOUR_BEAMS else 1
            found = 44 * rows if warm else 44 * (rows - 1)  # equal rows are read once
            assert held.usage == CallUsage(45 * rows, found)
            assert_nothing_is_held(held)
        assert (held.num_calls, held.num_plain_calls) == (2, 0)
    assert_as_it_came(model, gathering(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_that_share_a_beginning(family: str) -> None:
    """One system prompt before questions of different length; what the rows share is read once."""
    system = draw(1, 40, 77)["input_ids"]

    def drawn(seed: int) -> Inputs:
        inputs = draw(8, 62, seed)
        for row in range(8):
            pad = (0, 3, 7, 12, 1, 9, 21, 20)[row]
            inputs["input_ids"][row, pad : pad + 40] = system
            inputs["input_ids"][row, :pad] = 0
            inputs["attention_mask"][row, :pad] = 0
        return inputs

    with attached(small(family, attention=gathering(family))) as held:
        model = held.model
        assert_same(lambda inputs: generated(model, inputs), shared(family), drawn)
        assert held.usage.prompt_tokens == 8 * 62 - 73
        assert held.usage.cached_tokens >= 7 * 32  # two whole blocks of the system prompt
        assert_same(lambda inputs: generated(model, inputs, **FOUR_BEAMS), shared(family), drawn, **FOUR_BEAMS)
        assert_nothing_is_held(held)


@pytest.mark.parametrize("kv", ["full", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_another_prompt_is_never_answered_with_an_old_prefix(family: str, kv: str) -> None:
    """Prompts that branch off each other anywhere, alone and in batches; each as if it were the first."""
    rng = random.Random(f"{family} {kv}")
    model = small(family, attention=gathering(family))
    texts = [[rng.randrange(3, VOCAB) for _ in range(60)]]
    with attached(model, kv=kv) as held:
        for _ in range(14):
            rows = [branched(rng, texts) for _ in range(rng.choice((1, 1, 3)))]
            texts += rows
            inputs = padded(rows)
            settings = {"max_new_tokens": 6, "min_new_tokens": 6}
            found = generated(model, inputs, **settings)
            if kv == "full":
                expected = generated(shared(family), inputs, **settings)
            else:
                with attached(small(family), kv=kv) as fresh:
                    expected = generated(fresh.model, inputs, **settings)
            assert torch.equal(found, expected), rows
            assert_nothing_is_held(held)
        assert held.stats().hit_tokens > 100


def branched(rng: random.Random, texts: list[list[int]]) -> list[int]:
    head = rng.choice(texts)
    kept = head[: rng.randrange(1, len(head) + 1)]
    return [*kept, *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(0, 25)))][:90]


def padded(rows: list[list[int]]) -> Inputs:
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def test_proposed_tokens_are_verified_behind_a_cached_prompt(llama: PreTrainedModel) -> None:
    helper = small("llama", seed=3)
    with attached(llama) as held:
        ways: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 5}, *[{"assistant_model": helper}] * 2]
        for more in ways:
            assert_same(functools.partial(generated, llama, **more), shared("llama"), **more)
        assert held.usage.cached_tokens == 44
        assert_nothing_is_held(held)


def test_a_helper_that_has_a_cache_attached_too(llama: PreTrainedModel) -> None:
    helper = small("llama", seed=3)
    with attached(llama), attached(helper) as its:
        for _ in range(2):
            found = generated(llama, draw(), assistant_model=helper)
            assert torch.equal(found, generated(shared("llama"), draw(), assistant_model=shared("llama", seed=3)))
        assert its.num_plain_calls == 0
        del found
        gc.collect()
        its.clear()
        assert its.stats().num_blocks == 0


def test_the_question_is_computed_and_the_rest_is_found(llama: PreTrainedModel) -> None:
    first, second = draw(1, 60), draw(1, 60)
    second["input_ids"][:, 50:] = draw(1, 10, 9)["input_ids"]
    with attached(llama) as held:
        generated(llama, first)
        assert torch.equal(generated(llama, second), generated(shared("llama"), second))
        assert held.usage == CallUsage(60, 50)


def test_prompts_in_chunks_are_found_whole(llama: PreTrainedModel) -> None:
    config = settings_of(prefill_chunk_size=16, max_new_tokens=NUM_NEW)
    with attached(llama) as held:
        for cached in (0, 44):
            assert torch.equal(generated(llama, draw(), prefill_chunk_size=16), generated(shared("llama"), draw()))
            assert held.usage == CallUsage(45, cached)
        asked(llama, **draw(), generation_config=config)
        assert (held.usage, config.prefill_chunk_size) == (CallUsage(45, 44), 16)


def test_hidden_states_of_the_whole_prompt_are_there(llama: PreTrainedModel) -> None:
    more: Any = {"output_hidden_states": True, "return_dict_in_generate": True, "output_logits": True}
    with attached(llama):
        generated(llama, draw())
        for model in (llama, shared("llama")):
            assert generated(model, draw(), **more).hidden_states[0][-1].shape == (1, 45, 64)
        found, expected = generated(llama, draw(), **more), generated(shared("llama"), draw(), **more)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_pipelines_and_chat_templates_just_work() -> None:
    tokenizer = byte_tokenizer()
    model = small("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    make: Any = pipeline
    chat = [{"role": "system", "content": "Answer in one word. " * 4}, {"role": "user", "content": "Which colour?"}]

    def say() -> str:
        speaker = make("text-generation", model=model, tokenizer=tokenizer)
        return str(speaker(chat, max_new_tokens=8, do_sample=False)[0]["generated_text"][-1]["content"])

    expected = say()
    with attached(model) as held:
        assert [say(), say()] == [expected] * 2
        assert held.usage.cached_tokens == held.usage.prompt_tokens - 1 > 80
        chat[1]["content"] = "Which tree?"
        say()
        assert held.usage.cached_tokens >= 80


# --- caches in the caller's hands


def test_a_cache_that_is_handed_back_goes_on(llama: PreTrainedModel) -> None:
    more: Any = {"return_dict_in_generate": True}
    with attached(llama) as held:
        result = generated(llama, draw(1, 30), **more)
        cache = getattr(result, cache_keyword(llama))
        assert isinstance(cache, DynamicKVCache)
        assert cache.get_seq_length() == 30 + NUM_NEW - 1
        ids = torch.cat([result.sequences, draw(1, 9, 4)["input_ids"]], dim=1)
        following = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = generated(llama, following, cache)
        assert torch.equal(found, generated(shared("llama"), following))
        assert held.usage == CallUsage(30 + NUM_NEW + 9, 30 + NUM_NEW - 1)
        changed = {"input_ids": ids.clone()}
        changed["input_ids"][0, 10] = (ids[0, 10] + 1) % VOCAB
        for each, cached in ((changed, 10), ({"input_ids": ids[:, :20]}, 19)):
            assert torch.equal(generated(llama, each, cache), generated(shared("llama"), each))
            assert held.usage.cached_tokens == cached
        more = draw(1, 4, 8)["input_ids"]
        mask = torch.ones(1, cache.get_seq_length() + 4, dtype=torch.long)
        generated(llama, {"input_ids": more, "attention_mask": mask}, cache)  # the new tokens alone
        assert cache.get_seq_length() == mask.shape[1] + NUM_NEW - 1
        twin = copy.deepcopy(cache)
        del cache, result, twin
        generated(llama, draw(1, 5))
        assert_nothing_is_held(held)


def test_a_batch_that_is_handed_back_goes_on_as_beams(llama: PreTrainedModel) -> None:
    with attached(llama):
        result = generated(llama, draw(2, 30, pads=(0, 6)), return_dict_in_generate=True)
        following = {"input_ids": result.sequences, "attention_mask": torch.ones_like(result.sequences)}
        following["attention_mask"][1, :6] = 0
        cache = getattr(result, cache_keyword(llama))
        found = generated(llama, following, cache, **FOUR_BEAMS)
        assert torch.equal(found, generated(shared("llama"), following, **FOUR_BEAMS))


def test_another_mask_over_the_same_tokens_is_another_prompt(llama: PreTrainedModel) -> None:
    inputs = draw(2, 40, pads=(0, 6))
    inputs["input_ids"][1, :6] = 5
    shown = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    with attached(llama) as held:
        for each in (inputs, shown, inputs, shown):
            assert torch.equal(generated(llama, each), generated(shared("llama"), each))
        assert_nothing_is_held(held)


def test_other_positions_are_another_prompt(llama: PreTrainedModel) -> None:
    moved = {**draw(), "position_ids": torch.arange(100, 145)[None]}
    with attached(llama) as held:
        for each in (moved, draw(), moved):
            assert torch.equal(generated(llama, each), generated(shared("llama"), each))
        assert held.usage.cached_tokens == 0
        assert torch.equal(generated(llama, draw()), generated(shared("llama"), draw()))
        assert held.usage.cached_tokens == 44
        assert_nothing_is_held(held)


# --- calls that run as without the cache


def test_calls_that_leave_no_choice_run_as_without_it(llama: PreTrainedModel) -> None:
    bare, ids = shared("llama", "sdpa"), draw()["input_ids"]
    embedded = {"inputs_embeds": llama.get_input_embeddings()(ids).detach()}
    eager = shared("llama")
    calls: list[tuple[Any, dict[str, Any], PreTrainedModel]] = [
        (draw(), {"use_cache": False}, bare),
        (draw(), {"generation_config": settings_of(use_cache=False)}, bare),
        (draw(), {"cache_implementation": "static"}, bare),
        (draw(), {"guidance_scale": 1.5}, bare),
        (draw(), {"assistant_early_exit": 1}, bare),
        (embedded, {}, bare),
    ]
    with attached(llama) as held:
        generated(llama, draw())
        for number, (inputs, more, reference) in enumerate(calls, start=1):
            assert torch.equal(generated(llama, inputs, **more), generated(reference, inputs, **more)), more
            assert held.num_plain_calls == number, more
        theirs = DynamicCache(config=llama.config)
        assert torch.equal(generated(llama, draw(), theirs), generated(bare, draw()))
        own = DynamicKVCache(llama.config, memory="64MB", kv="full")
        assert torch.equal(generated(llama, draw(), own), generated(bare, draw()))
        assert (held.num_plain_calls, own.get_seq_length()) == (8, theirs.get_seq_length())
        llama.train()
        generated(llama, draw())
        llama.train(False)
        assert held.num_plain_calls == 9
        assert_nothing_is_held(held)
    del eager


def test_prompts_padded_on_the_right_are_answered_as_without_it(llama: PreTrainedModel) -> None:
    inputs = draw(2, 30)
    inputs["attention_mask"][0, 20:] = 0
    with attached(llama) as held:
        for number in (1, 2):
            assert torch.equal(generated(llama, inputs), generated(shared("llama"), inputs))
            assert held.num_plain_calls == number


def test_attentions_are_given_by_the_models_own_attention() -> None:
    model = small("llama")
    with attached(model) as held:
        found = generated(model, draw(), output_attentions=True, return_dict_in_generate=True)
        assert found.attentions[0][0].shape == (1, 4, 45, 45)
        assert held.num_plain_calls == 1


def test_arguments_by_place_are_understood(llama: PreTrainedModel) -> None:
    config = settings_of(use_cache=False, max_new_tokens=NUM_NEW)
    ids = draw()["input_ids"]
    with attached(llama) as held:
        assert torch.equal(asked(llama, ids, config), asked(shared("llama"), ids, config))
        assert held.num_plain_calls == 1
        config.use_cache = True
        assert torch.equal(asked(llama, ids, config), asked(shared("llama"), ids, config))
        assert (held.num_plain_calls, held.usage) == (1, CallUsage(45, 0))


def test_a_call_inside_a_call_runs_as_without_it(llama: PreTrainedModel) -> None:
    inner: list[torch.Tensor] = []

    def ask(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not inner:
            inner.append(generated(llama, draw(1, 20, 3)))
        return scores

    with attached(llama) as held:
        found = generated(llama, draw(), logits_processor=[ask])
        assert torch.equal(found, generated(shared("llama"), draw()))
        assert torch.equal(inner[0], generated(shared("llama"), draw(1, 20, 3)))
        assert (held.num_plain_calls, held.usage) == (1, CallUsage(45, 0))


def test_plain_calls_of_a_model_that_came_with_our_attention() -> None:
    for family in ("llama", "gemma2"):
        model, bare = small(family, attention=ATTENTION_NAME), shared(family)
        embedded = {"inputs_embeds": model.get_input_embeddings()(draw()["input_ids"]).detach()}
        with attached(model) as held:
            assert torch.equal(generated(model, draw(), use_cache=False), generated(bare, draw()))
            assert torch.equal(generated(model, embedded), generated(bare, embedded))
            own = DynamicKVCache(model.config, memory="64MB", kv="full")
            padded = draw(2, 30, pads=(0, 5))
            assert torch.equal(generated(model, padded, own), generated(bare, padded))
            assert held.num_plain_calls == 3
            assert torch.equal(generated(model, draw()), generated(bare, draw()))
        assert_as_it_came(model, ATTENTION_NAME)


def test_a_plain_call_has_read_nothing_from_this_cache(llama: PreTrainedModel) -> None:
    with attached(llama) as held:
        for _ in range(2):
            generated(llama, draw())
        assert held.usage == CallUsage(45, 44)
        generated(llama, draw(), use_cache=False)
        assert held.usage == CallUsage(0, 0)


# --- the model, before and after


def test_the_bare_model_computes_as_ever_between_calls(llama: PreTrainedModel) -> None:
    ids = draw()["input_ids"]
    with torch.no_grad():
        expected = llama(input_ids=ids).logits
        with attached(llama):
            generated(llama, draw())
            assert torch.equal(llama(input_ids=ids).logits, expected)
        assert torch.equal(llama(input_ids=ids).logits, expected)


def test_modes_and_a_generate_of_the_models_own_come_back() -> None:
    model = small("llama")
    model.train()
    model.get_submodule("model.layers.1").eval()
    modes = [module.training for module in model.modules()]
    own = model.generate
    model.generate = own
    held = attached(model)
    assert [module.training for module in model.modules()] == modes
    held.detach()
    held.detach()
    assert vars(model)["generate"] is own


def test_a_second_cache_is_refused_until_the_first_is_detached(llama: PreTrainedModel) -> None:
    with attached(llama), pytest.raises(ConfigError, match="has a cache attached already"):
        attached(llama)
    attached(llama).detach()


def test_a_model_that_cannot_be_served_is_left_as_it_was() -> None:
    for family in ("bloom", "jetmoe"):
        from ktransformer2.models.tiny import build_random, tiny_config

        model = build_random(tiny_config(family))
        before, attention = generated(model, draw()), model.config._attn_implementation
        with pytest.raises(UnsupportedModelError):
            attached(model)
        assert_as_it_came(model, attention)
        assert torch.equal(generated(model, draw()), before)


def test_wrong_knobs_leave_the_model_as_it_was(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="block_tokens"):
        attach(llama, memory="64MB", block_token=16)
    with pytest.raises(ConfigError, match="1000 is not allowed"):
        attach(llama, memory="1KB")
    with pytest.raises(OutOfMemoryError):
        attach(llama, memory="8KB")
    generated(llama, draw())


def test_memory_goes_back_at_detach_and_with_a_forgotten_model() -> None:
    model = small("llama")
    held = attached(model)
    generated(model, draw(4, 100))
    assert held.cache.resident_bytes() > 0
    held.detach()
    with pytest.raises(EngineClosedError):
        held.clear()
    held = attached(model)
    generated(model, draw(4, 100))
    gone = weakref.ref(held.cache)
    del model, held
    gc.collect()
    assert gone() is None


def _merge(model: PreTrainedModel) -> None:
    model.get_parameter("model.layers.1.self_attn.v_proj.weight").data += 0.3


def _write(model: PreTrainedModel) -> None:
    weight = model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    weight.data.copy_(weight.data.flip(0))


def _stretch(model: PreTrainedModel) -> None:
    model.get_buffer("model.rotary_emb.inv_freq").data.mul_(0.5)


def _steer(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda module, given, found: found + 1.0)


def _patch(model: PreTrainedModel) -> None:
    mlp = model.get_submodule("model.layers.0.mlp")
    before = mlp.forward
    mlp.forward = lambda *given: 2 * before(*given)


# --- tiers


def test_a_prompt_is_found_again_in_the_next_attachment(tmp_path: Path) -> None:
    """As after a restart: another model object with the same weights, another cache, one directory."""
    kept = tmp_path / "kv"
    answers = []
    for found in (0, 90 // BLOCK * BLOCK):
        model = small("llama", attention="sdpa")
        with attached(model, persist=kept) as held:
            answers.append(generated(model, draw(1, 91)))
            assert held.usage == CallUsage(91, found)
            assert held.stats().restored_tokens == ({"disk": found} if found else {})
    assert torch.equal(*answers)
    assert torch.equal(answers[0], generated(small("llama", attention="sdpa"), draw(1, 91)))


def test_rows_that_share_a_beginning_come_up_once(tmp_path: Path) -> None:
    inputs = draw(3, 60)
    inputs["input_ids"][1, :40] = inputs["input_ids"][0, :40]
    usages = []
    for _ in range(2):
        model = small("llama", attention="sdpa")
        with attached(model, persist=str(tmp_path / "kv")) as held:
            generated(model, inputs)
            usages.append(held.usage.cached_tokens)
            stats = held.cache.tier_stats()
            assert stats is not None
            assert stats.late_blocks == stats.homeless_blocks == 0
    assert usages[1] >= 3 * (59 // BLOCK * BLOCK) > usages[0]


@pytest.mark.parametrize("change", [_merge, _write, _stretch])
def test_other_weights_find_nothing_on_disk(change: Callable[[Any], None], tmp_path: Path) -> None:
    for changed in (False, True):
        model = small("llama", attention="sdpa")
        if changed:
            change(model)
        with attached(model, persist=tmp_path / "kv") as held:
            generated(model, draw())
            assert held.usage.cached_tokens == 0


def test_what_a_changed_model_read_is_not_kept_under_the_name_of_the_first(tmp_path: Path) -> None:
    model = small("llama", attention="sdpa")
    with attached(model, persist=tmp_path / "kv"):
        _merge(model)
        generated(model, draw())
    again = small("llama", attention="sdpa")
    with attached(again, persist=tmp_path / "kv") as held:
        generated(again, draw())
        assert held.usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("change", "why"), [(_steer, "module 'model.layers.0.mlp' has a hook"), (_patch, "the forward of module")]
)
def test_a_model_with_a_hook_is_not_kept(change: Callable[[Any], None], why: str, tmp_path: Path) -> None:
    model = small("llama", attention="sdpa")
    change(model)
    with pytest.raises(ConfigError, match=why):
        attached(model, persist=tmp_path / "kv")
    assert model.config._attn_implementation == "sdpa"
    with attached(model):
        generated(model, draw())


def test_after_clear_nothing_is_found_on_disk_either(tmp_path: Path) -> None:
    """`clear` is for changes that are not seen: what was read before them is not to be found."""
    model = small("llama", attention="sdpa")
    with attached(model, persist=tmp_path / "kv", write_policy="write_through") as held:
        generated(model, draw())
        assert held.cache._lower is not None
        assert held.cache._lower._combiner.flush(10.0)
        held.clear()
        for found in (0, 44):
            generated(model, draw())
            assert held.usage.cached_tokens == found


def test_nothing_is_kept_unless_it_is_asked(llama: PreTrainedModel, tmp_path: Path) -> None:
    with attached(llama, disk_directory=str(tmp_path / "kv")) as held:
        generated(llama, draw())
        assert held.cache.tier_stats() is None
    assert not (tmp_path / "kv").exists()


def test_an_attachment_that_nobody_detached_keeps_what_it_read(tmp_path: Path) -> None:
    model = small("llama", attention="sdpa")
    attached(model, persist=tmp_path / "kv")
    generated(model, draw())
    del model
    gc.collect()
    again = small("llama", attention="sdpa")
    with attached(again, persist=tmp_path / "kv") as held:
        generated(again, draw())
        assert held.usage.cached_tokens > 0


def test_a_cache_that_is_told_no_token_says_that_it_cannot_last(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="is told no token, so the next process could find nothing in it"):
        DynamicKVCache(llama.config, persist=True)


def test_clear_forgets_and_gives_back(llama: PreTrainedModel) -> None:
    with attached(llama) as held:
        generated(llama, draw(1, 100))
        assert held.clear() > 0
        assert held.stats().committed_bytes == 0
        generated(llama, draw(1, 100))
        assert held.usage == CallUsage(100, 0)


def test_changed_weights_find_nothing_that_others_computed(llama: PreTrainedModel) -> None:
    result = None
    with attached(llama) as held:
        result = generated(llama, draw(), return_dict_in_generate=True)
        cache = getattr(result, cache_keyword(llama))
        with torch.no_grad():
            for parameter in llama.parameters():
                parameter.mul_(1.1)
        bare = copy.deepcopy(llama)
        assert torch.equal(generated(llama, draw()), generated(bare, draw()))
        assert held.usage.cached_tokens == 0
        ids = torch.cat([result.sequences, draw(1, 3)["input_ids"]], dim=1)
        following = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(generated(llama, following, cache), generated(bare, following))


@pytest.mark.parametrize("change", [_merge, _write, _stretch, _steer, _patch])
def test_a_model_that_was_changed_finds_nothing_that_it_computed_before(change: Callable[[Any], None]) -> None:
    model, bare = small("llama", attention="sdpa"), small("llama", attention="sdpa")
    with attached(model) as held:
        for _ in range(2):
            assert torch.equal(generated(model, draw()), generated(bare, draw()))
        assert held.usage.cached_tokens == 44
        change(model)
        change(bare)
        assert torch.equal(generated(model, draw()), generated(bare, draw()))
        assert held.usage.cached_tokens == 0


def test_weights_made_in_inference_mode_are_looked_at_too() -> None:
    with torch.inference_mode():
        model = small("llama", attention="sdpa")
    with attached(model) as held:
        generated(model, draw())
        with torch.inference_mode():
            model.get_parameter("model.layers.1.self_attn.v_proj.weight").mul_(1.1)
        generated(model, draw())
        assert held.usage.cached_tokens == 0
        generated(model, draw())
        assert held.usage.cached_tokens == 44


def test_a_hook_that_is_gone_again_leaves_what_was_found_before(llama: PreTrainedModel) -> None:
    with attached(llama) as held:
        generated(llama, draw())
        hook = llama.get_submodule("model.layers.0").register_forward_hook(lambda *_: None)
        generated(llama, draw())
        assert held.usage.cached_tokens == 0
        hook.remove()
        generated(llama, draw())
        assert held.usage.cached_tokens == 44


def test_a_copy_of_the_model_has_no_cache(llama: PreTrainedModel) -> None:
    with attached(llama) as held:
        twin = copy.deepcopy(llama)
        assert torch.equal(generated(twin, draw()), generated(shared("llama"), draw()))
        assert held.num_calls == 0
        with attached(twin) as its:
            generated(twin, draw())
            assert (held.num_calls, its.num_calls) == (0, 1)
        assert generated(llama, draw()).shape == (1, 45 + NUM_NEW)
        generate: Any = llama.generate
        assert list(inspect.signature(generate).parameters)[:2] == ["inputs", "generation_config"]


def test_another_type_of_numbers_is_told(llama: PreTrainedModel) -> None:
    with attached(llama):
        torch.nn.Module.to(llama, torch.bfloat16)
        with pytest.raises(ConfigError, match=r"is torch.bfloat16 now, it was attached in torch.float32"):
            generated(llama, draw())
        torch.nn.Module.to(llama, torch.float32)
        generated(llama, draw())


# --- what goes wrong


def test_no_room_is_told_with_numbers_and_holds_nothing(llama: PreTrainedModel) -> None:
    with attached(llama, memory=200_000) as held:
        with pytest.raises(OutOfMemoryError, match=r"prompts of 720 tokens in 4 rows need .* MB and memory=0.2 MB"):
            generated(llama, draw(4, 180))
        assert_nothing_is_held(held)
        with pytest.raises(OutOfMemoryError, match="MB is the limit"):
            generated(llama, draw(1, 45), max_new_tokens=2000, min_new_tokens=2000)
        assert_nothing_is_held(held)
        assert torch.equal(generated(llama, draw()), generated(shared("llama"), draw()))


@pytest.mark.parametrize("where", ["prompt", "answer", "settings"])
def test_an_error_inside_a_call_holds_nothing(where: str, llama: PreTrainedModel) -> None:
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if where == "prompt" else 4):
            raise RuntimeError("the hook failed")

    with attached(llama) as held:
        hook = llama.get_submodule("model.layers.1").register_forward_pre_hook(fail)
        wrong: Any = {"no_such_setting": 1} if where == "settings" else {}
        with pytest.raises(ValueError if wrong else RuntimeError):
            generated(llama, draw(), **wrong)
        hook.remove()
        assert llama.config._attn_implementation == "sdpa"
        assert_nothing_is_held(held)
        assert torch.equal(generated(llama, draw()), generated(shared("llama"), draw()))


def test_a_callers_cache_outlives_an_error(llama: PreTrainedModel) -> None:
    with attached(llama):
        result = generated(llama, draw(1, 30), return_dict_in_generate=True)
        cache = getattr(result, cache_keyword(llama))
        ids = torch.cat([result.sequences, draw(1, 4)["input_ids"]], dim=1)
        following = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with pytest.raises(ValueError, match="no_such_setting"):
            generated(llama, following, cache, no_such_setting=1)
        assert cache.get_seq_length() == 30 + NUM_NEW - 1
        assert torch.equal(generated(llama, following, cache), generated(shared("llama"), following))


def test_calls_from_threads_wait_for_each_other(llama: PreTrainedModel) -> None:
    found: dict[int, torch.Tensor] = {}

    def ask(seed: int) -> None:
        found[seed] = generated(llama, draw(2, 50, seed % 2))

    with attached(llama) as held:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(6))
        for seed, answer in found.items():
            assert torch.equal(answer, generated(shared("llama"), draw(2, 50, seed % 2)))
        assert_nothing_is_held(held)


@pytest.mark.parametrize("attention", ["sdpa", "eager", ATTENTION_NAME])
def test_the_model_is_called_in_another_thread_while_it_generates(attention: str) -> None:
    model, bare, inputs = small("llama", attention=attention), shared("llama"), draw(2, 30, pads=(0, 7))
    found: list[torch.Tensor] = []

    def ask() -> None:
        with torch.no_grad():
            found.append(model(**inputs, use_cache=False).logits)

    def meanwhile(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return scores

    with attached(model):
        answer = generated(model, draw(), logits_processor=[meanwhile])
        assert torch.equal(answer, generated(bare, draw()))
    with torch.no_grad():
        expected = bare(**inputs, use_cache=False).logits
    real = inputs["attention_mask"].to(torch.bool)
    assert len(found) == NUM_NEW
    for logits in found:
        torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-4)
    if attention == ATTENTION_NAME:
        with pytest.raises(UnsupportedModelError, match="from a cache of this package"):
            ask()


def test_a_call_that_waited_while_the_cache_was_detached_is_told(llama: PreTrainedModel) -> None:
    held = attached(llama)
    waiting: Any = llama.generate
    held.detach()
    with pytest.raises(EngineClosedError, match="call generate\\(\\) again"):
        waiting(**draw())
