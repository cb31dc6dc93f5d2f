"""A model's cache is there again in the next process: `LLM(persist=...)` on a real disk."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.engine.llm import LLM
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import ConfigError

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
