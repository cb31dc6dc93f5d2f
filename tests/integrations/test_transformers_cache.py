"""The drop-in beside DynamicCache: the same answers in every way to generate, and the whole Cache contract."""

from __future__ import annotations

import copy
import gc
import pickle
import queue
import threading
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.llm import LLM
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import ConfigError, OutOfMemoryError, RequestError, UnsupportedModelError
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.models.hf import HFModel, cache_keyword
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

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "qwen2")
BOTH_WAYS = [*((family, "paged") for family in FAMILIES), *((f, "gathered") for f in ("llama", "gemma2", "gpt_oss"))]
PADS = (0, 3, 7, 12, 1, 30, 44, 20)  # one row begins with a single token


def cache_of(model: PreTrainedModel, **knobs: Any) -> DynamicKVCache:
    settings: dict[str, Any] = {"kv": "full", "memory": "64MB", "block_tokens": BLOCK, **knobs}
    return DynamicKVCache(model.config, **settings)


def paged(family: str) -> PreTrainedModel:
    return shared(family, ATTENTION_NAME)


def attentions(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return paged(family), shared(family, gathering(family))


def forward(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
    """Logits fp32 [B, T, vocab] of a direct call."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, **{cache_keyword(model): cache}, **more).logits
    return logits.float()


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --- every way to generate


@pytest.mark.parametrize("settings", [{}, SAMPLED, FOUR_BEAMS], ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize(("family", "way"), BOTH_WAYS)
def test_generate_answers_as_with_its_own_cache(family: str, settings: dict[str, Any], way: str) -> None:
    model = attentions(family)[way == "gathered"]
    caches = []

    def ours(inputs: Inputs) -> torch.Tensor:
        caches.append(cache_of(model))
        found: torch.Tensor = generated(model, inputs, caches[-1], **settings)
        return found

    assert_same(ours, shared(family), **settings)
    assert caches[-1].get_seq_length() == 45 + NUM_NEW - 1
    assert caches[-1].kv is not None
    caches[-1].kv.check_integrity()


@pytest.mark.parametrize(("family", "way"), BOTH_WAYS)
def test_a_ragged_batch_padded_on_the_left(family: str, way: str) -> None:
    model = attentions(family)[way == "gathered"]
    assert_same(
        lambda inputs: generated(model, inputs, cache_of(model)),
        shared(family),
        lambda seed: draw(8, 45, seed, pads=PADS),
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_beams_of_a_padded_batch(family: str) -> None:
    model = paged(family)
    assert_same(
        lambda inputs: generated(model, inputs, cache_of(model), **FOUR_BEAMS),
        shared(family),
        lambda seed: draw(3, 40, seed, pads=(0, 25, 4)),
        **FOUR_BEAMS,
    )


def repetitive(seed: int) -> Inputs:
    """A prompt whose end was there before, so that looking it up proposes tokens."""
    head = draw(1, 15, seed)["input_ids"]
    ids = torch.cat([head, head, head], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(("family", "way"), BOTH_WAYS)
def test_tokens_proposed_from_the_prompt(family: str, way: str) -> None:
    model = attentions(family)[way == "gathered"]
    settings = {"prompt_lookup_num_tokens": 6}
    assert_same(lambda i: generated(model, i, cache_of(model), **settings), shared(family), repetitive, **settings)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_tokens_proposed_by_another_model(family: str, settings: dict[str, Any]) -> None:
    model, helper = paged(family), small(family, seed=0, num_hidden_layers=2)
    more: dict[str, Any] = {"assistant_model": helper, **settings}
    assert_same(lambda inputs: generated(model, inputs, cache_of(model), **more), shared(family), **more)


def test_many_proposed_tokens_are_taken_back_exactly_in_int8() -> None:
    """Wrong proposals cross blocks; what is answered is what int8 answers without any."""
    model, helper = paged("llama"), small("llama", seed=5, num_hidden_layers=2)
    helper.generation_config.num_assistant_tokens = 40
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0.0
    for seed in range(2):
        inputs = draw(1, 61, seed)
        alone = generated(model, inputs, cache_of(model, kv="int8"))
        helped = generated(model, inputs, cache_of(model, kv="int8"), assistant_model=helper)
        assert torch.equal(alone, helped)


def engine_answer(served: HFModel, prompt: list[int], **knobs: Any) -> list[int]:
    cache = KVCache(served.geometry, CacheConfig(block_tokens=BLOCK, memory_bytes=64_000_000, **knobs))
    engine = Engine(served, cache)
    engine.add(prompt, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True))
    answer: list[int] = []
    while engine.has_work:
        answer += [token for chunk in engine.step() for token in chunk.token_ids]
    engine.close()
    cache.close()
    return answer


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_int8_answers_as_the_engine_does(family: str) -> None:
    """The same blocks in the same form."""
    served = HFModel(small(family), weights_hash=bytes(32))
    for seed in range(3):
        inputs = draw(1, 61, seed)
        ours = generated(paged(family), inputs, cache_of(paged(family), kv="int8"))
        assert ours[0, 61:].tolist() == engine_answer(served, inputs["input_ids"][0].tolist(), kv="int8")


# --- lengths and masks


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_and_mask_sizes_are_those_of_a_dynamic_cache(family: str) -> None:
    for model in attentions(family):
        ours, theirs = cache_of(model), DynamicCache(config=model.config)
        assert [ours.is_sliding[i] for i in range(3)] == theirs.is_sliding
        assert (ours.batch_size, ours.get_seq_length(), ours.kv) == (-1, 0, None)
        for num_new in (5, 1, 20, 1, 1, 13):
            ids = draw(2, num_new, num_new)["input_ids"]
            forward(shared(family), ids, theirs)
            forward(model, ids, ours)
            for layer in range(3):
                assert ours.get_seq_length(layer) == theirs.get_seq_length(layer)
                single: Any = ours.layers[layer]
                assert single.get_seq_length() == theirs.get_seq_length(layer)
                for query in (1, 7):
                    assert ours.get_mask_sizes(query, layer) == theirs.get_mask_sizes(query, layer)
                    assert single.get_mask_sizes(query) == theirs.get_mask_sizes(query, layer)
            assert (ours.batch_size, len(ours), ours.get_max_length(0)) == (2, 3, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_direct_calls(family: str) -> None:
    for model in attentions(family):
        ours, theirs = cache_of(model), DynamicCache(config=model.config)
        for num_new in (30, 1, 2, 17):
            ids = draw(3, num_new, num_new)["input_ids"]
            assert_near(forward(model, ids, ours), forward(shared(family), ids, theirs))


@pytest.mark.parametrize("way", ["paged", "gathered"])
def test_a_backward_pass_is_refused_and_the_cache_goes_on(way: str) -> None:
    model = small("llama", attention=ATTENTION_NAME if way == "paged" else "sdpa")
    cache, ids = cache_of(model), draw(1, 20)["input_ids"]
    loss = model(input_ids=ids, **{cache_keyword(model): cache}).logits.logsumexp(-1).sum()
    with pytest.raises(RequestError, match="no gradients go through this cache"):
        loss.backward()
    model.requires_grad_(False)
    assert not model(input_ids=ids, **{cache_keyword(model): cache}).logits.requires_grad
    assert cache.get_seq_length() == 40


def test_a_call_with_gradients_on_and_one_in_inference_mode_share_a_cache() -> None:
    model = paged("llama")
    ours, theirs = cache_of(model), DynamicCache(config=model.config)
    ids = draw(1, 40)["input_ids"]
    expected = [forward(shared("llama"), ids, theirs), forward(shared("llama"), ids, theirs)]
    with torch.inference_mode():
        found = model(input_ids=ids, **{cache_keyword(model): ours}).logits
    assert_near(found, expected[0])
    assert_near(model(input_ids=ids, **{cache_keyword(model): ours}).logits.detach(), expected[1])
    ours.reset()  # what inference mode made is written outside of it
    assert_near(forward(model, ids, ours), expected[0])


# --- cutting


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_crop_within_reach_is_exact(family: str) -> None:
    for kv in ("full", "int8"):
        for model in attentions(family):
            ours, alone = (cache_of(model, kv=kv, max_rollback_tokens=30) for _ in range(2))
            ids = draw(2, 80)["input_ids"]
            forward(model, ids[:, :40], ours)
            forward(model, draw(2, 25, 9)["input_ids"], ours)
            ours.crop(-25)
            found = forward(model, ids[:, 40:], ours)
            forward(model, ids[:, :40], alone)
            assert_near(found, forward(model, ids[:, 40:], alone))
            assert ours.get_seq_length() == 80


def test_a_crop_out_of_reach_keeps_the_cut_block_in_int8() -> None:
    model = paged("llama")
    ours, theirs = cache_of(model, kv="int8"), DynamicCache(config=model.config)
    ids = draw(1, 100)["input_ids"]
    forward(model, ids, ours)
    forward(shared("llama"), ids[:, :37], theirs)
    ours.crop(-63)
    found, expected = forward(model, ids[:, 37:60], ours), forward(shared("llama"), ids[:, 37:60], theirs)
    distance = (found - expected).norm() / expected.norm()
    assert 1e-6 < distance < 0.05


def test_a_window_does_not_come_back_and_nothing_is_lost() -> None:
    model = paged("mistral")
    ours, theirs = cache_of(model), DynamicCache(config=model.config)
    ids = draw(2, 70)["input_ids"]
    for cache, reader in ((ours, model), (theirs, shared("mistral"))):
        forward(reader, ids, cache)
    with pytest.raises(ConfigError, match="cannot take back 40 tokens: layers with a sliding window"):
        ours.crop(-40)
    assert ours.get_seq_length() == 70
    assert_near(forward(model, ids[:, :9], ours), forward(shared("mistral"), ids[:, :9], theirs))


def test_a_crop_takes_a_negative_number_and_zero_is_nothing() -> None:
    model = paged("llama")
    cache = cache_of(model)
    cache.crop(-5)
    forward(model, draw()["input_ids"], cache)
    with pytest.raises(ValueError, match=r"crop\(3\): give a negative number"):
        cache.crop(3)
    cache.crop(0)
    assert cache.get_seq_length() == 45
    cache.crop(-99)
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)


# --- rows


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_are_repeated_selected_and_reordered(family: str) -> None:
    for model in attentions(family):
        ours, theirs = cache_of(model), DynamicCache(config=model.config)
        both = ((ours, model), (theirs, shared(family)))

        def assert_equal_step(rows: int, both: Any = both) -> None:
            ids = draw(rows, 3, rows)["input_ids"]
            found, expected = (forward(reader, ids, cache) for cache, reader in both)
            assert_near(found, expected)

        for cache, reader in both:
            forward(reader, draw(2, 21)["input_ids"], cache)
            cache.batch_repeat_interleave(3)
        assert_equal_step(6)
        for cache, _ in both:
            cache.batch_select_indices(torch.tensor([5, 0, 0, -2]))
        assert_equal_step(4)
        for cache, _ in both:
            cache.reorder_cache(torch.LongTensor([3, 3, 1, 0]))
        assert_equal_step(4)
        for cache, _ in both:
            cache.batch_select_indices(torch.tensor([True, False, False, True]))
        assert_equal_step(2)
        assert ours.kv is not None
        ours.kv.check_integrity()


def test_rows_that_are_not_there_are_refused() -> None:
    model = paged("llama")
    cache = cache_of(model)
    forward(model, draw(2)["input_ids"], cache)
    with pytest.raises(IndexError):
        cache.batch_select_indices(torch.tensor([0, 2]))
    assert cache.batch_size == 2


# --- one cache, several calls


def test_reset_gives_everything_back_and_another_batch_may_come() -> None:
    model = paged("llama")
    cache = cache_of(model)
    forward(model, draw(4, 100)["input_ids"], cache)
    kv = cache.kv
    assert kv is not None
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
    assert (kv.stats().used_bytes, kv.stats().committed_bytes) == (0, 0)
    assert_same(
        lambda inputs: generated(model, inputs, _emptied(cache)), shared("llama"), lambda seed: draw(2, 45, seed)
    )
    assert cache.kv is kv


def _emptied(cache: DynamicKVCache) -> DynamicKVCache:
    cache.reset()
    return cache


def test_another_type_of_numbers_may_come_after_a_reset_only() -> None:
    full, half = paged("llama"), small("llama", dtype=torch.bfloat16, attention=ATTENTION_NAME)
    cache = cache_of(full)
    forward(full, draw()["input_ids"], cache)
    with pytest.raises(UnsupportedModelError, match=r"in torch.bfloat16 and torch.bfloat16; .* in torch.float32"):
        forward(half, draw(1, 1)["input_ids"], cache)
    assert cache.get_seq_length() == 45
    cache.reset()
    assert torch.equal(generated(half, draw(), cache), generated(half, draw(), cache_of(half)))


def test_a_conversation_goes_on_with_its_cache() -> None:
    for model in attentions("gemma2"):
        ours, theirs = cache_of(model), DynamicCache(config=model.config)
        inputs = draw(1, 20)
        for turn in range(3):
            found, expected = generated(model, inputs, ours), generated(shared("gemma2"), inputs, theirs)
            assert torch.equal(found, expected)
            ids = torch.cat([found, draw(1, 5, turn)["input_ids"]], dim=1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_only_the_new_tokens_may_be_given_with_the_mask_of_all() -> None:
    model = paged("llama")
    ours, theirs = cache_of(model), DynamicCache(config=model.config)
    inputs = draw(1, 20)
    generated(model, inputs, ours)
    generated(shared("llama"), inputs, theirs)
    more = draw(1, 6, 5)["input_ids"]
    following = {"input_ids": more, "attention_mask": torch.ones(1, ours.get_seq_length() + 6, dtype=torch.long)}
    assert torch.equal(generated(model, following, ours), generated(shared("llama"), following, theirs))


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_a_prompt_read_once_is_copied_for_every_question(kv: str) -> None:
    """The prompt cache of the transformers documentation; copies that are gone cost nothing."""
    model = paged("llama")
    prompt, known = draw(1, 70)["input_ids"], cache_of(model, kv=kv)
    forward(model, prompt, known)
    assert known.kv is not None
    used = known.kv.stats().used_bytes
    for seed in range(3):
        ids = torch.cat([prompt, draw(1, 40, seed)["input_ids"]], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = generated(model, inputs, copy.deepcopy(known))
        again = cache_of(model, kv=kv)
        forward(model, prompt, again)
        assert torch.equal(found, generated(model, inputs, again))
        if kv == "full":
            assert torch.equal(found, generated(shared("llama"), inputs))
    assert known.get_seq_length() == 70
    generated(model, inputs, copy.deepcopy(known))
    known.crop(-1)  # any step lets go what nobody holds
    forward(model, prompt[:, -1:], known)
    assert known.kv.stats().used_bytes == used
    known.kv.check_integrity()


def test_prompts_in_chunks() -> None:
    for model in attentions("gemma2"):
        found = generated(model, draw(), cache_of(model), prefill_chunk_size=13)
        assert torch.equal(found, generated(shared("gemma2"), draw()))


class Collected:
    """A streamer as transformers' own: it hands tokens from one thread to another."""

    def __init__(self) -> None:
        self.tokens: queue.Queue[list[int] | None] = queue.Queue()

    def put(self, value: torch.Tensor) -> None:
        self.tokens.put(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.put(None)


def test_generate_in_a_thread_with_a_cache_made_here() -> None:
    model, streamer = paged("llama"), Collected()
    cache, inputs = cache_of(model), draw()
    forward(model, inputs["input_ids"][:, :10], cache)
    thread = threading.Thread(target=generated, args=(model, inputs, cache), kwargs={"streamer": streamer})
    thread.start()
    found = [token for tokens in iter(streamer.tokens.get, None) for token in tokens]
    thread.join()
    assert found == generated(shared("llama"), inputs)[0].tolist()
    cache.crop(-3)  # it is this thread's again


# --- what goes wrong


@pytest.mark.parametrize("way", ["paged", "gathered"])
def test_no_room_is_told_with_numbers_and_the_cache_is_as_before(way: str) -> None:
    model = attentions("llama")[way == "gathered"]
    cache, theirs = cache_of(model, memory=400_000), DynamicCache(config=model.config)
    ids = draw(2, 30)["input_ids"]
    forward(model, ids, cache)
    forward(shared("llama"), ids, theirs)
    with pytest.raises(OutOfMemoryError, match=r"MB .*limit.*0\.4 MB|memory=0\.4 MB is the limit"):
        forward(model, draw(2, 1000)["input_ids"], cache)
    assert cache.kv is not None
    cache.kv.check_integrity()
    assert_near(forward(model, ids[:, :4], cache), forward(shared("llama"), ids[:, :4], theirs))


def test_a_failed_first_call_leaves_an_empty_cache() -> None:
    model = paged("llama")
    cache = cache_of(model, memory=400_000)
    with pytest.raises(OutOfMemoryError):
        generated(model, draw(8, 200), cache)
    assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
    assert torch.equal(generated(model, draw(), cache), generated(shared("llama"), draw()))


@pytest.mark.parametrize("way", ["paged", "gathered"])
@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_an_error_amid_a_pass_leaves_no_trace(where: str, way: str) -> None:
    model = small("gemma2", attention=(ATTENTION_NAME, "eager")[way == "gathered"])
    ours, theirs = cache_of(model), DynamicCache(config=model.config)
    ids = draw(2, 30)["input_ids"]
    forward(model, ids, ours)
    expected = [forward(shared("gemma2"), part, theirs) for part in (ids, ids[:, :5], ids[:, :1])]
    layer: Any = model.get_submodule("model.layers.1")
    place = {"before": layer, "inside": layer.self_attn.o_proj, "after": layer.mlp}[where]

    def fail(*_: Any) -> None:
        raise RuntimeError("the hook failed")

    for num_new in (5, 1, 40):
        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="the hook failed"):
            forward(model, draw(2, num_new, 3)["input_ids"], ours)
        hook.remove()
        assert ours.get_seq_length() == 30
    for part, logits in zip((ids[:, :5], ids[:, :1]), expected[1:], strict=True):
        assert_near(forward(model, part, ours), logits)
    assert ours.kv is not None
    ours.kv.check_integrity()


def test_a_pass_that_broke_off_in_a_thread_that_ended_is_taken_over() -> None:
    model = small("llama", attention=ATTENTION_NAME)
    cache = cache_of(model)
    forward(model, draw()["input_ids"], cache)
    layer: Any = model.get_submodule("model.layers.2")

    def fail(*_: Any) -> None:
        raise RuntimeError("the hook failed")

    def broken() -> None:
        with pytest.raises(RuntimeError, match="the hook failed"):
            forward(model, draw(1, 3)["input_ids"], cache)

    hook = layer.register_forward_pre_hook(fail)
    thread = threading.Thread(target=broken)
    thread.start()
    thread.join()
    hook.remove()
    forward(model, draw(1, 3)["input_ids"], cache)
    assert cache.get_seq_length() == 48


def test_another_batch_size_is_refused() -> None:
    for model in attentions("llama"):
        cache = cache_of(model)
        forward(model, draw(2)["input_ids"], cache)
        with pytest.raises(RequestError, match="holds 2 rows and was called with a batch of 3"):
            forward(model, draw(3, 1)["input_ids"], cache)
        forward(model, draw(2, 1)["input_ids"], cache)


def test_a_mask_of_other_tokens_is_refused_paged() -> None:
    model, inputs = paged("llama"), draw(2, 45, pads=(0, 5))
    cache = cache_of(model)
    forward(model, inputs["input_ids"], cache, attention_mask=inputs["attention_mask"])
    ids, mask = draw(2, 1)["input_ids"], torch.ones(2, 46, dtype=torch.long)
    for wrong, complaint in ((mask, "hides or shows"), (mask[:, 1:], "has 45 columns"), (None, "no attention mask")):
        with pytest.raises(RequestError, match=complaint):
            forward(model, ids, cache, attention_mask=wrong)
    mask[:, :45] = inputs["attention_mask"]
    forward(model, ids, cache, attention_mask=mask)
    assert cache.get_seq_length() == 46


def test_padding_in_the_middle_is_refused_where_a_window_would_count_it() -> None:
    model, inputs = paged("gemma2"), draw(1, 20)
    inputs["attention_mask"][0, 7:9] = 0
    with pytest.raises(RequestError, match="pad on the left"):
        forward(model, inputs["input_ids"], cache_of(model), attention_mask=inputs["attention_mask"])


def test_padding_in_the_middle_is_served_without_windows() -> None:
    """As of a conversation whose turns were padded each for itself."""
    model, ids = paged("llama"), draw(2, 20)["input_ids"]
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 6:14] = 0
    ours, theirs = cache_of(model), DynamicCache(config=model.config)
    for part, columns in ((ids, 20), (draw(2, 1, 3)["input_ids"], 21)):
        whole = torch.cat([mask, torch.ones(2, columns - 20, dtype=torch.long)], dim=1)
        positions = (whole.cumsum(dim=1) - 1)[:, -part.shape[1] :]
        found, expected = (
            forward(reader, part, cache, attention_mask=whole, position_ids=positions)
            for reader, cache in ((model, ours), (shared("llama"), theirs))
        )
        real = whole[:, -part.shape[1] :].to(torch.bool)
        assert_near(found[real], expected[real])


def test_padding_on_the_right_is_refused_paged_and_served_gathered() -> None:
    (model, gathered), inputs = attentions("llama"), draw(2, 20)
    inputs["attention_mask"][0, 14:] = 0
    with pytest.raises(RequestError, match="pad on the left"):
        generated(model, inputs, cache_of(model))
    assert torch.equal(generated(gathered, inputs, cache_of(gathered)), generated(shared("llama"), inputs))


def test_a_mask_of_four_dimensions_is_refused_paged_and_served_gathered() -> None:
    ids, mask = draw(1, 6)["input_ids"], torch.zeros(1, 1, 6, 6)
    with pytest.raises(UnsupportedModelError, match="attention mask of its own"):
        forward(paged("llama"), ids, cache_of(paged("llama")), attention_mask=mask)
    model = shared("llama")
    theirs = DynamicCache(config=model.config)
    assert_near(
        forward(model, ids, cache_of(model), attention_mask=mask), forward(model, ids, theirs, attention_mask=mask)
    )


def test_a_mask_with_more_than_causality_is_refused_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of one image see each other; the first ones of the text do not show it."""
    model = paged("llama")
    modeling: Any = __import__(type(model).__module__, fromlist=["create_causal_mask"])
    plain = modeling.create_causal_mask

    def with_blocks(**request: Any) -> Any:
        blocks = torch.full((1, 40), -1)
        blocks[0, 25:30] = 0
        return plain(**request, block_sequence_ids=blocks)

    monkeypatch.setattr(modeling, "create_causal_mask", with_blocks)
    with pytest.raises(UnsupportedModelError, match="another mask over the causal one"):
        forward(model, draw(1, 40)["input_ids"], cache_of(model))


def test_a_paged_batch_does_not_go_on_with_another_attention() -> None:
    model = small("llama", attention=ATTENTION_NAME)
    cache, inputs = cache_of(model), draw(2, 20, pads=(0, 5))
    forward(model, inputs["input_ids"], cache, attention_mask=inputs["attention_mask"])
    model.set_attn_implementation("eager")
    with pytest.raises(RequestError, match="padded batch of paged attention"):
        forward(model, draw(2, 1)["input_ids"], cache)
    cache.reset()
    forward(model, draw(3, 1)["input_ids"], cache)


def test_heads_the_config_does_not_tell_are_refused_by_name() -> None:
    model = small("llama")
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = 1
    with pytest.raises(UnsupportedModelError, match=r"layer 0 hands over keys and values of shape .* in torch.float32"):
        forward(model, draw()["input_ids"], DynamicKVCache(config, memory="64MB"))


def test_a_model_on_its_own_is_told_what_it_misses() -> None:
    with pytest.raises(UnsupportedModelError, match="pass a DynamicKVCache"):
        generated(paged("llama"), draw())


# --- the object


def test_memory_goes_back_with_the_object() -> None:
    model = paged("llama")
    cache = cache_of(model)
    forward(model, draw(2, 60)["input_ids"], cache)
    cache.get_mask_sizes(1)  # waits for a mask that never comes
    twin = copy.deepcopy(cache)
    kv, gone = weakref.ref(cache.kv), weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
        assert kv() is not None  # the copy still reads its blocks
        del twin
        assert kv() is None
    finally:
        gc.enable()


def test_a_cache_is_copied_deeply_or_not_at_all() -> None:
    cache = cache_of(paged("llama"))
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            attempt(cache)
    forward(paged("llama"), draw(2)["input_ids"], cache)
    assert repr(cache) == "DynamicKVCache(rows=2, columns=45, full)"


def test_wrong_knobs_and_models_are_told_at_once() -> None:
    config = paged("llama").config
    with pytest.raises(ConfigError, match="kv"):
        DynamicKVCache(config, kv="int9", memory="64MB")
    with pytest.raises(ConfigError, match="block_tokens"):
        DynamicKVCache(config, memory="64MB", block_token=16)
    encoder = copy.deepcopy(config)
    encoder.is_encoder_decoder = True
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        DynamicKVCache(encoder)


@pytest.mark.parametrize("wrong", [None, "model"])
def test_anything_but_a_config_is_told_at_the_border(wrong: Any) -> None:
    given: Any = paged("llama") if wrong else None
    with pytest.raises(ConfigError, match=r"it takes the model's config, DynamicKVCache\(model.config\)"):
        DynamicKVCache(given)
    with pytest.raises(ConfigError, match=r"load_model\(\) returned.*attach\(model\)"):
        LLM(given)


@pytest.mark.parametrize("way", ["paged", "gathered"])
def test_a_shorter_prompt_behind_a_longer_one_is_told(way: str) -> None:
    model = attentions("llama")[way == "gathered"]
    cache = cache_of(model)
    generated(model, draw(1, 40), cache)
    with pytest.raises(RequestError, match=r"holds 55 columns .*reset\(\) it .*attach"):
        generated(model, draw(1, 20, 5), cache)
    cache.reset()
    assert torch.equal(generated(model, draw(1, 20, 5), cache), generated(shared("llama"), draw(1, 20, 5)))


def test_sizes_are_counted_against_the_limit() -> None:
    model = shared("llama", "sdpa")
    cache = cache_of(model)
    forward(model, draw(1, VOCAB)["input_ids"], cache)
    assert cache.kv is not None
    assert cache.kv.stats().peak_bytes <= 64_000_000
