"""A model's cache is there again in the next process: `LLM(persist=...)` on a real disk."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformer2.engine.llm import LLM
from ktransformer2.engine.memory_budget import Memory
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import ConfigError
from ktransformer2.models.loading import load_model

PARAMS = SamplingParams(8, ignore_eos=True)
TEXT = "The parties agree as follows. " * 30
OPTIONS: dict[str, Any] = {"dtype": "float32", "memory": "64MB", "block_tokens": 16}


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_the_second_run_reuses_all_full_blocks_of_the_prompt(tiny_model_folder: Path, tmp_path: Path, kv: str) -> None:
    outputs = []
    for _ in range(2):
        with LLM(tiny_model_folder, persist=tmp_path / "kv", kv=kv, **OPTIONS) as llm:
            outputs += llm.generate(TEXT, PARAMS)
    num_full = (outputs[0].usage.prompt_tokens - 1) // 16 * 16
    assert outputs[0].usage.cached_tokens == 0
    assert outputs[1].usage.cached_tokens >= num_full > 500
    assert outputs[1].usage.restored_tokens == {"disk": num_full}
    assert outputs[0].token_ids == outputs[1].token_ids
    stats = llm.cache.tier_stats()
    assert stats is not None
    assert stats.held_blocks["disk"] > 0


def test_an_adapter_that_was_loaded_afterwards_is_another_model(tiny_model_folder: Path, tmp_path: Path) -> None:
    """As PEFT does it: a layer takes the place of another, and the model's files are the same."""
    cached: list[int] = []
    for scale in (None, 1.0, 2.0, 1.0, None):
        loaded = load_model(tiny_model_folder, dtype="float32")
        if scale is not None:
            attention: Any = loaded.model.model.get_submodule("model.layers.0.self_attn")
            attention.v_proj = Adapted(attention.v_proj, scale)
        with LLM(loaded, persist=tmp_path / "kv", memory="64MB", block_tokens=16) as llm:
            cached.append(llm.generate(TEXT, PARAMS)[0].usage.cached_tokens)
    assert cached[:3] == [0, 0, 0]
    assert cached[3] == cached[4] > 500


class Adapted(torch.nn.Module):
    """A layer with an adapter, as PEFT's layers say it."""

    def __init__(self, base_layer: torch.nn.Module, scale: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._active_adapter, self._disable_adapters, self.scaling = ["one"], False, {"one": scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base_layer(x) * (1 + self.scaling["one"])
        return found


def test_a_model_that_was_used_is_still_the_one_of_its_files(tiny_model_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(tiny_model_folder, dtype="float32")
    for _ in range(2):
        with LLM(loaded, persist=tmp_path / "kv", memory="64MB") as llm:
            llm.generate(TEXT, PARAMS)
    assert loaded.model.lasting_fingerprint() == loaded.model.fingerprint
    loaded.model.model.get_submodule("model.layers.0").register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="nothing of this model can be kept for the next process: module 'model"):
        LLM(loaded, persist=tmp_path / "kv", memory="64MB")
    with LLM(loaded, memory="64MB", host_bytes=2**20):
        pass  # what ends with the process needs no name


def test_a_prefill_that_was_cancelled_is_found_again_on_disk(tiny_model_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a long prompt: its full blocks are kept, and the same prompt hits them, also later."""
    options = {**OPTIONS, "max_step_tokens": 100, "persist": tmp_path / "kv"}
    with LLM(tiny_model_folder, **options) as llm:
        chunks = llm.stream(TEXT, PARAMS)
        while (next(chunks).prefill or (0, 0))[0] < 300:
            pass
        chunks.close()
        again = llm.stream(TEXT, PARAMS)
        assert (next(again).prefill or (0, 0))[0] == 300 // 16 * 16 + 100, "it goes on behind the last full block"
        again.close()
    with LLM(tiny_model_folder, **options) as llm:
        (output,) = llm.generate(TEXT, PARAMS)
    assert output.usage.restored_tokens == {"disk": 388 // 16 * 16}


def test_memory_auto_leaves_what_the_host_tier_may_take(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memory, "measure", lambda: Memory(10**9))
    limits = []
    for host_bytes in (0, 10**8):
        with LLM(tiny_model_folder, dtype="float32", host_bytes=host_bytes) as llm:
            limits.append(llm.cache.config.memory_bytes)
    assert limits[0] - limits[1] == pytest.approx(0.8 * 10**8, abs=1)


def test_a_library_keeps_nothing_unless_it_is_asked(tiny_model_folder: Path, tmp_path: Path) -> None:
    with LLM(tiny_model_folder, disk_directory=str(tmp_path / "kv"), **OPTIONS) as llm:
        llm.generate("Some text.", PARAMS)
        assert llm.cache.tier_stats() is None
    assert not (tmp_path / "kv").exists()


def test_a_directory_may_be_named_as_text(tiny_model_folder: Path, tmp_path: Path) -> None:
    with LLM(tiny_model_folder, persist=str(tmp_path / "kv"), **OPTIONS) as llm:
        assert llm.tier_config.disk_directory == str(tmp_path / "kv")
    assert (tmp_path / "kv").is_dir()


def test_what_is_dropped_without_close_is_kept_too(tiny_model_folder: Path, tmp_path: Path) -> None:
    llm = LLM(tiny_model_folder, persist=tmp_path / "kv", **OPTIONS)
    llm.generate(TEXT, PARAMS)
    del llm
    gc.collect()
    assert all("ktransformer2 " not in thread.name for thread in threading.enumerate()), "no thread is left"
    with LLM(tiny_model_folder, persist=tmp_path / "kv", **OPTIONS) as again:
        assert again.generate(TEXT, PARAMS)[0].usage.num_restored > 500


def test_a_wrong_setting_is_named(tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="write_policy='never' is not allowed"):
        LLM(tiny_model_folder, write_policy="never", **OPTIONS)
    with pytest.raises(ConfigError, match="did you mean 'disk_bytes'"):
        LLM(tiny_model_folder, disk_byte=1, **OPTIONS)
