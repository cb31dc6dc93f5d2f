"""An environment of its own for every peer, under the user's cache directory. Versions: `requirements/peers`.

    python -m ktransformer2.bench.peers.environments REQUIREMENTS_FOLDER [PEER...]

makes those that are missing or whose requirements changed. A peer that does not install leaves its error behind, which
the scenario prints in its place. Side effects: downloads; llama.cpp is compiled, which takes ten minutes on one core.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ktransformer2.bench.outcome import say
from ktransformer2.bench.peers.process import PeerError
from ktransformer2.errors import ConfigError
from ktransformer2.models.store import cache_directory

_INSTALLED, _FAILED = "requirements.txt", "why-not.txt"
_LAST_WORDS = 600
# For pip: llama.cpp is compiled for this processor, without its image part.
_VARIABLES: Mapping[str, Mapping[str, str]] = {"llamacpp": {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}}
# What comes along and fails at import beside a torch for CPUs; both work without.
_UNWANTED: Mapping[str, tuple[str, ...]] = {
    "openvino": ("torchvision",),
    "vllm": ("torchvision", "torchaudio", "torchcodec"),
}


def peers_directory() -> Path:
    """Where environments and converted models lie."""
    return cache_directory() / "peers"


def python_of(peer: str) -> Path:
    """The interpreter of a peer. Raises: PeerError where it is not installed, with the reason where that was tried."""
    home = peers_directory() / peer
    if (home / _FAILED).is_file():
        raise PeerError(f"it did not install: {(home / _FAILED).read_text()}")
    if not (home / _INSTALLED).is_file():
        raise PeerError("it is not installed; `make bench-peers` does that")
    return home / "bin" / "python"


def install(peer: str, requirements: Path) -> None:
    """Make the environment of a peer, unless the same requirements made it before. Raises: PeerError."""
    home, wanted = peers_directory() / peer, requirements.read_text()
    if (home / _INSTALLED).is_file() and (home / _INSTALLED).read_text() == wanted:
        return
    say(f"{peer}: making its environment in {home}")
    shutil.rmtree(home, ignore_errors=True)
    python = home / "bin" / "python"
    commands = [
        [sys.executable, "-m", "venv", str(home)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)],
    ]
    if peer in _UNWANTED:
        commands.append([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *_UNWANTED[peer]])
    for command in commands:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | _VARIABLES.get(peer, {})
        )
        if done.returncode:
            why = " ".join(done.stderr[-_LAST_WORDS:].split()) or f"{command[0]} ended with {done.returncode}"
            home.mkdir(parents=True, exist_ok=True)
            (home / _FAILED).write_text(why)
            raise PeerError(f"it did not install: {why}")
    (home / _INSTALLED).write_text(wanted)


def main(folder: Path, peers: list[str]) -> None:
    """All that have a file in `folder`, or those named. One that fails does not stop the others."""
    files = {path.stem: path for path in sorted(folder.glob("*.txt"))}
    for peer in peers or files:
        if peer not in files:
            raise ConfigError(f"there is no peer {peer!r} in {folder}; there are: {', '.join(files)}")
        try:
            install(peer, files[peer])
        except PeerError as error:
            say(f"{peer}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
