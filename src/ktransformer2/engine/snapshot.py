"""All counters of a cache and its engine at one moment, to be written down and read again. Knows no file.

Invariant: what is read back equals what was written; anything else is refused with the name of what is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from ktransformer2.cache.stats import CacheStats
from ktransformer2.engine.outputs import EngineStats
from ktransformer2.errors import ConfigError


@dataclass(frozen=True)
class Snapshot:
    """Counters since the cache and the engine began, and what they hold now."""

    cache: CacheStats
    engine: EngineStats

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Plain dictionaries of numbers, by the names of the fields."""
        cache = {field.name: getattr(self.cache, field.name) for field in dataclasses.fields(CacheStats)}
        return {"cache": cache | {"evictions": dict(self.cache.evictions)}, "engine": dataclasses.asdict(self.engine)}

    @classmethod
    def from_json(cls, found: object) -> Self:
        """What `as_json` made, or an object that has it under `stats`. Raises ConfigError."""
        if isinstance(found, Mapping) and isinstance(found.get("stats"), Mapping):
            found = found["stats"]
        if not isinstance(found, Mapping) or not {"cache", "engine"} <= found.keys():
            raise ConfigError(
                "no snapshot; wanted is an object with `cache` and `engine`, or one that has it as `stats`"
            )
        cache = _numbers("cache", found["cache"], CacheStats)
        cache["evictions"] = MappingProxyType(cache["evictions"])
        return cls(CacheStats(**cache), EngineStats(**_numbers("engine", found["engine"], EngineStats)))


def _numbers(part: str, found: object, stats: type[CacheStats] | type[EngineStats]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(stats)]
    values = dict(found) if isinstance(found, Mapping) else {}
    if wrong := set(names) ^ set(values):
        raise ConfigError(f"no snapshot of this version: {part} has no, or is not to have, {', '.join(sorted(wrong))}")
    evictions = values.get("evictions", {})
    numbers = [*evictions.values(), *(values[name] for name in names if name != "evictions")]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise ConfigError(f"no snapshot: {part} holds something that is no number")
    return values
