"""A tiny model in a folder, and a cache directory of the test's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ktransformer2.models.demo import byte_tokenizer
from tests.models.tiny import tiny


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Tiny matrices gain nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the user's cache directory."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(directory))
    return directory


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    tokenizer = byte_tokenizer()
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model_folder(saved_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved_model, tmp_path / "tiny-llama"))
