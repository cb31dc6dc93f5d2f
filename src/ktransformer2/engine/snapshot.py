"""All counters of a cache and its engine at one moment, to be written down and read again. Knows no file.

Invariant: what is read back equals what was written; anything else is refused with the name of what is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ktransformer2.cache.stats import CacheStats, read_numbers
from ktransformer2.engine.outputs import EngineStats
from ktransformer2.errors import ConfigError


@dataclass(frozen=True)
class Snapshot:
    """Counters since the cache and the engine began, and what they hold now."""

    cache: CacheStats
    engine: EngineStats

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Plain dictionaries of numbers, by the names of the fields."""
        return {"cache": self.cache.as_json(), "engine": dataclasses.asdict(self.engine)}

    @classmethod
    def from_json(cls, found: object) -> Self:
        """What `as_json` made, or an object that has it under `stats`. Raises ConfigError."""
        if isinstance(found, Mapping) and isinstance(found.get("stats"), Mapping):
            found = found["stats"]
        if not isinstance(found, Mapping) or not {"cache", "engine"} <= found.keys():
            raise ConfigError(
                "no snapshot; wanted is an object with `cache` and `engine`, or one that has it as `stats`"
            )
        engine = EngineStats(**read_numbers("engine", found["engine"], EngineStats))
        return cls(CacheStats.from_json(found["cache"]), engine)
