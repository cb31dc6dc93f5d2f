"""`models`: what is listed of a cache directory, and what may be removed from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import CacheNotFound

from ktransformer2.cli import guard
from ktransformer2.models import inventory
from tests.cli.invoking import assert_as_before, failed, invoke

DIGEST = "ab" * 32
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory with one GGUF file, unpacked in two types; the hub's own cache is empty."""
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path))

    def nothing() -> Any:
        raise CacheNotFound("no cache", "/nowhere")

    monkeypatch.setattr(inventory, "scan_cache_dir", nothing)
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / "gguf" / f"{DIGEST[:32]}-{dtype}-1"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "gguf" / ".unfinished-x").mkdir()
    (tmp_path / "demo.gguf").write_bytes(bytes(10))
    (tmp_path / "file-hashes.json").write_text(json.dumps({"/data/small.gguf|10|1": DIGEST}))
    return tmp_path


def test_list(directory: Path) -> None:
    rows = json.loads(invoke("models", "--json").stdout)["models"]
    size = 1000 + len(json.dumps(CONFIG))
    folder = directory / "gguf"
    unpacked = {"name": "small.gguf", "bytes": size, "context": 8192, "architecture": "LlamaForCausalLM"}
    assert rows == [
        unpacked | {"form": f"unpacked GGUF, {dtype}", "path": str(folder / f"{DIGEST[:32]}-{dtype}-1")}
        for dtype in ("bfloat16", "float32")
    ] + [
        {
            "name": "demo.gguf",
            "form": "GGUF file",
            "bytes": 10,
            "context": None,
            "architecture": "",
            "path": str(directory / "demo.gguf"),
        }
    ]
    shown = invoke("models").stdout.splitlines()
    assert shown[0].split() == ["name", "form", "bytes", "context", "architecture", "path"]
    assert "small.gguf  unpacked GGUF, bfloat16" in shown[1]
    assert len(shown) == 4


def test_an_empty_machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(directory / "empty"))
    assert json.loads(invoke("models", "--json").stdout) == {"models": []}
    assert invoke("models").stdout.startswith("No model yet")


def test_a_context_length_may_lie_in_the_text_part(directory: Path) -> None:
    config = directory / "gguf" / f"{DIGEST[:32]}-float32-1" / "config.json"
    config.write_text(json.dumps({"architectures": ["Some"], "text_config": {"max_position_embeddings": 4096}}))
    rows = json.loads(invoke("models", "--json").stdout)["models"]
    assert [row["context"] for row in rows] == [8192, 4096, None]


def test_architectures(repository: Path) -> None:
    rows = json.loads(invoke("models", "--architectures", "--json").stdout)["architectures"]
    served = [row["model_type"] for row in rows if row["outcome"] == "served"]
    page = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    assert all(f"| {row['model_type']} | {row['class']} |" in page for row in rows)
    assert f"**Served**: {len(served)} model types" in page
    assert all(row["reason"] for row in rows if row["outcome"] != "served")
    shown = invoke("models", "--architectures").stdout
    assert_as_before("models-architectures", shown)
    assert [line.split()[0] for line in shown.splitlines()[1 : len(served) + 1]] == sorted(served)


def test_rm(directory: Path) -> None:
    message = failed(invoke("models", "rm", "small.gguf"), guard.EXIT_FAILED)
    assert message.startswith(f"error: small.gguf means 2 models; name one: {DIGEST[:32]}-bfloat16-1, ")
    gone = directory / "gguf" / f"{DIGEST[:32]}-bfloat16-1"
    assert invoke("models", "rm", gone.name).stdout.startswith(f"Removed {gone}: ")
    assert not gone.exists()
    assert invoke("models", "rm", "small.gguf").exit_code == 0
    assert invoke("models", "rm", "demo.gguf").exit_code == 0
    assert json.loads(invoke("models", "--json").stdout) == {"models": []}


@pytest.mark.parametrize("name", ["nothing", "..", "gguf", "/"])
def test_rm_removes_nothing_that_is_not_listed(directory: Path, name: str) -> None:
    assert "no model" in failed(invoke("models", "rm", name), guard.EXIT_FAILED)
    assert len(json.loads(invoke("models", "--json").stdout)["models"]) == 3
