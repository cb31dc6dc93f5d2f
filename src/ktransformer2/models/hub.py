"""Fetching a model from the hub. Downloads, redirects, resuming and the disk cache are huggingface_hub's.

HF_ENDPOINT names another hub, HF_TOKEN a token, HF_HUB_OFFLINE=1 forbids the network. Pickled weights are never
fetched. Every failure becomes one of our errors that says what to do.
"""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ktransformer2.errors import ModelError, ModelFileError, ModelNotFoundError, NotReachableError
from ktransformer2.models.weight_files import StoredTensor

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*", "*/*"]
_MAX_NEAR_NAMES = 5
_ANSWER_S, _AGAIN_AFTER_S = 5.0, 0.5
_log = logging.getLogger(__name__)


def endpoint() -> str:
    """The hub in use; read at each call, so that a changed environment counts."""
    return os.environ.get("HF_ENDPOINT") or constants.ENDPOINT


def fetch(repo_id: str, revision: str | None = None, offline: bool | None = None, file: str | None = None) -> Path:
    """The local folder of a hub model, or one of its files. Side effect: downloads what is missing.

    `offline=True` uses only what was downloaded before; None leaves that to HF_HUB_OFFLINE.
    Raises ModelNotFoundError (with near names), or ModelError saying what to do.
    """
    try:
        with _quietly():
            if file is not None:
                local = bool(offline) or not _answers(repo_id)
                return Path(
                    hf_hub_download(repo_id, file, revision=revision, local_files_only=local, endpoint=endpoint())
                )
            return Path(
                snapshot_download(
                    repo_id,
                    revision=revision,
                    local_files_only=bool(offline),
                    allow_patterns=_WANTED,
                    ignore_patterns=_UNWANTED,
                    endpoint=endpoint(),
                )
            )
    except Exception as error:
        raise _explained(error, repo_id, revision, bool(offline)) from error


def stored_tensors(repo_id: str, revision: str | None = None) -> list[StoredTensor]:
    """What the safetensors files of a hub model hold; of each only the header is fetched, nothing is kept.

    Raises ModelError, as `fetch`, also where the model has no safetensors.
    """
    try:
        with _quietly():
            found = HfApi(endpoint=endpoint()).get_safetensors_metadata(repo_id, revision=revision)
    except NotASafetensorsRepoError as error:
        raise ModelFileError(f"{repo_id}: holds no safetensors; name a GGUF file, or another model") from error
    except Exception as error:
        raise _explained(error, repo_id, revision, offline=False) from error
    return [
        StoredTensor(*tensor.data_offsets, name, tensor.dtype, tuple(tensor.shape))
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    ]


def _answers(repo_id: str) -> bool:
    """Whether the hub answers, whatever it says; asked twice. For one file huggingface_hub would go on for 23 s."""
    for pause_s in (_AGAIN_AFTER_S, 0.0):
        try:
            HfApi(endpoint=endpoint()).model_info(repo_id, timeout=_ANSWER_S)
        except (HfHubHTTPError, HFValidationError):
            return True
        except Exception as error:  # whichever its HTTP library raises; what follows from it is told by `fetch`
            _log.debug("the hub does not answer: %s", error)
            time.sleep(pause_s)
        else:
            return True
    return False


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings of huggingface_hub: every failure is told once, by our own error."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(max(before, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(before)


def _explained(error: Exception, repo_id: str, revision: str | None, offline: bool) -> ModelError:
    """The typed error for what huggingface_hub raised."""
    cause = error
    while isinstance(cause, LocalEntryNotFoundError) and isinstance(cause.__cause__, HfHubHTTPError):
        cause = cause.__cause__
    match cause:
        case GatedRepoError():
            return ModelError(
                f"{repo_id} is gated: accept its terms at {endpoint()}/{repo_id}, "
                "then run `hf auth login` or set HF_TOKEN"
            )
        case RepositoryNotFoundError():
            return ModelNotFoundError(
                f"no model {repo_id!r} on {endpoint()} (or it is private: set HF_TOKEN){_near(repo_id)}"
            )
        case RevisionNotFoundError():
            return ModelNotFoundError(f"{repo_id} has no revision {revision!r} on {endpoint()}")
        case HFValidationError():
            return ModelNotFoundError(f"{repo_id!r} is neither a path nor a hub name (owner/name)")
        case LocalEntryNotFoundError() | OfflineModeIsEnabled():
            not_asked = offline or constants.HF_HUB_OFFLINE
            why = "offline was asked for" if not_asked else f"{endpoint()} cannot be reached"
            kind = ModelError if not_asked else NotReachableError
            return kind(
                f"{repo_id} is not on this machine and {why}; connect, or name a model folder or a GGUF file{_cached()}"
            )
        case EntryNotFoundError():
            return ModelNotFoundError(f"{repo_id} has no such file: {str(cause).splitlines()[0]}")
    what = f"{type(cause).__name__}: {cause}"
    return ModelError(f"{repo_id} could not be downloaded from {endpoint()} ({what}); try again")


def _cached_names() -> list[str]:
    """Models that were downloaded before."""
    folder = Path(constants.HF_HUB_CACHE)
    return sorted(path.name.removeprefix("models--").replace("--", "/") for path in folder.glob("models--*"))


def _cached() -> str:
    names = _cached_names()[:_MAX_NEAR_NAMES]
    return f"; downloaded before: {', '.join(names)}" if names else ""


def _search(text: str) -> list[str]:
    """Names that the hub finds; none where it does not search: this only decorates an error that is raised anyway."""
    try:
        return [model.id for model in HfApi(endpoint=endpoint()).list_models(search=text, limit=_MAX_NEAR_NAMES)]
    except Exception as error:
        _log.debug("the hub does not search: %s", error)
        return []


def _near(repo_id: str) -> str:
    """Names like this one, here and on the hub; empty when there are none or the hub does not search."""
    names = _cached_names() + _search(repo_id.rpartition("/")[2])
    near = difflib.get_close_matches(repo_id, names, n=_MAX_NEAR_NAMES, cutoff=0.4)
    return f"; near: {', '.join(near)}" if near else ""
