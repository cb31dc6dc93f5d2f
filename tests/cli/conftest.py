"""Commands run as on a new machine: no settings of whoever runs the tests, and nothing kept on disk for the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformer2.settings import PREFIX, knobs


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No settings from the user's file or the environment, but that nothing persists. The current folder sets none."""
    folder = tmp_path_factory.mktemp("nothing-set")
    for name in knobs():
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    monkeypatch.setenv(PREFIX + "PERSIST", "off")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))  # for commands in a process of their own
    monkeypatch.setattr("ktransformer2.settings.user_file", lambda: folder / "config.toml")
    return folder / "config.toml"
