"""Loading by a hub name, against a hub on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from ktransformer2.errors import ModelError, ModelNotFoundError, NotReachableError
from ktransformer2.models.hub import fetch
from ktransformer2.models.loading import load_model
from tests.models.fake_hub import COMMIT, FakeHub, running


@pytest.fixture
def hub(saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub({"lab/tiny-llama": saved_model}, gated=frozenset({"lab/secret"}))) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        yield server


def test_a_hub_name_is_fetched_through_redirects_and_loaded(hub: FakeHub, saved_model: Path) -> None:
    loaded = load_model("lab/tiny-llama")
    assert loaded.source == "lab/tiny-llama"
    assert hub.ranges == [None]
    assert loaded.model.fingerprint == load_model(saved_model).model.fingerprint


def test_a_cut_download_is_resumed_where_it_broke_off(
    hub: FakeHub, saved_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut_after = 10_000
    folder = fetch("lab/tiny-llama")
    assert hub.ranges[0] is None
    assert hub.ranges[1] == "bytes=10000-"
    name = "model.safetensors"
    assert (folder / name).read_bytes() == (saved_model / name).read_bytes()


def test_what_was_fetched_once_loads_offline(hub: FakeHub) -> None:
    fetch("lab/tiny-llama")
    asked = len(hub.paths)
    assert fetch("lab/tiny-llama", offline=True).is_dir()
    assert len(hub.paths) == asked


def test_offline_without_a_copy_says_what_to_do(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="offline was asked for; connect, or name a model folder"):
        fetch("lab/tiny-llama", offline=True)


def test_pickles_are_never_fetched(hub: FakeHub, model_folder: Path) -> None:
    (model_folder / "pytorch_model.bin").write_bytes(b"\x80")
    hub.repositories["lab/pickled"] = model_folder
    folder = fetch("lab/pickled")
    assert not list(folder.glob("*.bin"))


def test_a_gated_model_says_what_to_do(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"is gated: accept its terms at .*/lab/secret, then run `hf auth login`"):
        load_model("lab/secret")


def test_an_unknown_model_names_near_ones(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFoundError, match="near: lab/tiny-llama"):
        load_model("lab/tiny-lama")


def test_an_unknown_revision_is_named(hub: FakeHub) -> None:
    assert fetch("lab/tiny-llama", revision=COMMIT).is_dir()
    with pytest.raises(ModelNotFoundError, match="no revision 'v9'"):
        fetch("lab/tiny-llama", revision="v9")


def test_an_unknown_file_is_named(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        load_model("lab/tiny-llama/model.gguf")


def test_a_hub_that_cannot_be_reached_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        load_model("lab/other")


def test_a_hub_that_cannot_be_reached_is_asked_twice_without_a_word(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = fetch("lab/tiny-llama", file="config.json")
    logger = logging.getLogger("huggingface_hub")
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.WARNING)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NotReachableError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        fetch("lab/other", file="config.json")
    assert pauses == [0.5, 0.0]
    assert caplog.messages == []
    assert logger.level == logging.WARNING
    assert fetch("lab/tiny-llama", file="config.json") == kept  # what is here is good enough
