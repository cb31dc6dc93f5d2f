"""Keyword arguments into configs: each setting to the config that has it. Knows no model."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktransformer2.config import CacheConfig, EngineConfig, TierConfig
from ktransformer2.errors import ConfigError

Configs = type[CacheConfig] | type[EngineConfig] | type[TierConfig]


def sorted_knobs(values: Mapping[str, Any], homes: tuple[Configs, ...]) -> list[dict[str, Any]]:
    """`values` by the config of `homes` that has them, unchecked. Raises ConfigError for one that none has."""
    home_of = {field.name: home for home in homes for field in dataclasses.fields(home)}
    for name in values:
        if name not in home_of:
            near = difflib.get_close_matches(name, sorted(home_of), n=1)
            known = f"see {', '.join(home.__name__ for home in homes)} for what there is"
            raise ConfigError(f"unknown setting {name!r}; {f'did you mean {near[0]!r}?' if near else known}")
    return [{name: value for name, value in values.items() if home_of[name] is home} for home in homes]


def persistence(persist: bool | str | Path) -> dict[str, str]:
    """`persist` as TierConfig has it: True, False, auto, on, off, or the directory where."""
    if isinstance(persist, bool):
        return {"persist": "on" if persist else "off"}
    if persist in ("auto", "on", "off"):
        return {"persist": str(persist)}
    return {"persist": "on", "disk_directory": str(persist)}
