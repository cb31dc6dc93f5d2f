"""What `memory="auto"` takes: of the machine, of its control groups, and of what is of use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformer2.config import EngineConfig
from ktransformer2.engine.memory_budget import (
    Memory,
    auto_memory_bytes,
    cgroup_limit_bytes,
    most_useful_bytes,
    spare_bytes,
    workspace_bytes,
)
from ktransformer2.errors import OutOfMemoryError
from ktransformer2.layout import Form, LayerGroup, ModelGeometry
from ktransformer2.models.footprint import ModelFootprint

GB = 10**9


def test_auto_is_four_fifths_of_what_weights_and_workspace_leave() -> None:
    assert auto_memory_bytes(Memory(10 * GB), 2 * GB, 1 * GB, 100 * GB) == 5_600_000_000
    assert auto_memory_bytes(Memory(10 * GB, 6 * GB), 2 * GB, 1 * GB, 100 * GB) == 2_400_000_000
    assert auto_memory_bytes(Memory(6 * GB, 10 * GB), 2 * GB, 1 * GB, 100 * GB) == 2_400_000_000


def test_what_the_host_tier_takes_is_taken_off_first() -> None:
    assert auto_memory_bytes(Memory(10 * GB).less(2 * GB), 2 * GB, 1 * GB, 100 * GB) == 4_000_000_000
    assert Memory(10 * GB, 6 * GB).less(2 * GB) == Memory(8 * GB, 4 * GB)


def test_auto_is_never_more_than_is_of_use() -> None:
    assert auto_memory_bytes(Memory(100 * GB), 0, 0, 3 * GB) == 3 * GB


def test_auto_says_what_is_missing() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        auto_memory_bytes(Memory(2 * GB), 19 * GB // 10, GB // 2, GB)
    assert str(caught.value).startswith(
        "memory='auto' finds 2000 MB, of which weights take 1900 and workspace 500 MB: 0 MB for the cache, at least 17"
    )


def test_what_is_of_use_follows_the_model_and_the_number_of_sequences() -> None:
    group = LayerGroup(tuple(range(30)), 3, 64, 64)
    geometry = ModelGeometry((group,), Form.BF16, 8192, (None,))
    assert most_useful_bytes(geometry, EngineConfig(max_num_sequences=4)) == 2 * 4 * 8192 * 23_040
    tiny = ModelGeometry((LayerGroup((0,), 1, 8, 8),), Form.FP32, 16, (None,))
    assert most_useful_bytes(tiny, EngineConfig(max_num_sequences=1)) == 16 * 2**20


def test_the_workspace_holds_rows_logits_and_the_tokenizer() -> None:
    footprint = ModelFootprint(0, row_bytes=100, logit_row_bytes=4000, vocab_size=1000, chooses_logits=True)
    config = EngineConfig(max_num_sequences=10, max_step_tokens=512)
    sampling_and_tokenizer = 1000 * 32 + 1000 * 900
    assert workspace_bytes(footprint, config) == 512 * 100 + 10 * 4000 + sampling_and_tokenizer
    assert workspace_bytes(footprint, config, num_rows=8) == 8 * 100 + 8 * 4000 + sampling_and_tokenizer
    assert workspace_bytes(footprint, config, num_rows=10**6) == workspace_bytes(footprint, config)


def test_what_is_spared_is_never_negative() -> None:
    assert spare_bytes(Memory(10 * GB, 6 * GB), 2 * GB, 1 * GB) == 2_400_000_000
    assert spare_bytes(Memory(1 * GB), 2 * GB, 0) == 0


def test_this_machine_has_memory() -> None:
    assert Memory.measure().available_bytes > 0


def system(tmp_path: Path, own: str, limits: dict[str, str]) -> int | None:
    for name, text in limits.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    return cgroup_limit_bytes(tmp_path / "fs", tmp_path / "own")


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    limits = {"a/memory.max": "5000", "a/b/memory.max": "max", "memory.max": "9000"}
    assert system(tmp_path, "0::/a/b\n", limits) == 5000


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    assert system(tmp_path, "0::/\n", {"memory.max": "7000"}) == 7000


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    own = "5:cpu,cpuacct:/x\n4:memory:/docker/1\n"
    limits = {"memory/docker/1/memory.limit_in_bytes": "4000", "memory/memory.limit_in_bytes": "9223372036854771712"}
    assert system(tmp_path, own, limits) == 4000


def test_no_limit_and_no_groups(tmp_path: Path) -> None:
    assert system(tmp_path, "0::/a\n", {"a/memory.max": "max"}) is None
    assert cgroup_limit_bytes(tmp_path / "none", tmp_path / "nothing") is None
