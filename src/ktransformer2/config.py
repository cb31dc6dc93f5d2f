"""Every knob, with its effect, unit, default and cost. Frozen and checked at load. Knows no other room.

A knob that came from the seed keeps the seed's name in its metadata, so that `config show` can print both.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ktransformer2.errors import ConfigError
from ktransformer2.layout import BLOCK_TOKENS_ALLOWED

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Bytes from `"4GB"`, `"512MiB"`, `"1.5G"` or a plain number. Raises ConfigError for anything else."""
    if isinstance(text, int):
        return text
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"size {text!r} is not understood; write a number with a unit, such as 4GB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def parse_tokens(text: str | int) -> int:
    """Tokens from `"32k"` (32 x 1,024), `"8192"` or a plain number. Raises ConfigError for anything else."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    if found is None:
        raise ConfigError(f"token count {text!r} is not understood; write a number such as 8192 or 32k")
    return int(float(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()])


def knob(default: Any, effect: str, *, unit: str = "", cost: str = "", seed: str = "") -> Any:
    """A dataclass field that documents itself."""
    return field(default=default, metadata={"effect": effect, "unit": unit, "cost": cost, "seed": seed})


class _Checked:
    """Loading with a named error for an unknown key, and range checks."""

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Self:
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown setting {key!r}{hint}")
        return cls(**values)

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}")


@dataclass(frozen=True)
class CacheConfig(_Checked):
    """How the cache grows, shrinks, keeps and holds. `memory_bytes` is the hard limit over everything it counts."""

    memory_bytes: int = knob(
        4 * 10**9,
        "hard limit over K, V, scales, tables and copies in flight",
        unit="bytes",
        cost="less memory: fewer cached prefixes, more waiting",
    )
    kv: str = knob("auto", "form of full blocks: auto (int8 in every layer), full (the model's precision) or int8")
    block_tokens: int = knob(
        64,
        "tokens of one block: the unit of sharing, sealing and moving",
        unit="tokens",
        cost="larger: more waste in the last block; smaller: more table entries",
    )
    initial_headroom_ratio: float = knob(
        1.2,
        "committed memory at the first growth, relative to what is asked",
        unit="ratio",
        seed="GROWTH_FACTOR 1.2x",
    )
    low_free_ratio: float = knob(
        0.20, "growth is due when less than this share of a chunk is free", unit="ratio", seed="20 %"
    )
    growth_factor: float = knob(
        1.5, "each growth in a row is larger by this factor, within its bound", unit="ratio", seed="GROWTH_FACTOR"
    )
    shrink_threshold_ratio: float = knob(
        0.5,
        "a shrink is due when less than this share of the newest chunks is used",
        unit="ratio",
        seed="SHRINK_THRESHOLD",
    )
    shrink_check_tokens: int = knob(100, "tokens between two shrink checks", unit="tokens", seed="each 100 tokens")
    min_chunk_tokens: int = knob(
        256, "smallest step of growth", unit="tokens", seed="MIN_CHUNK_SIZE", cost="larger: fewer steps, more waste"
    )
    defrag_interval_requests: int = knob(
        1000, "defragment at the latest after this many finished requests", unit="requests", seed="DEFRAG_INTERVAL"
    )
    max_fragmentation_ratio: float = knob(
        0.30, "defragment when 1 - largest free run / free passes this", unit="ratio", seed="fragmentation 30 %"
    )
    maintain_bytes: int = knob(
        8 * 2**20, "bytes that maintain() may copy between two steps", unit="bytes", cost="larger: longer pauses"
    )
    cached_share_ratio: float = knob(0.5, "share of the limit that blocks without a user may keep", unit="ratio")
    cached_idle_s: float = knob(300.0, "blocks without a user are freed after this long", unit="seconds")
    max_rollback_tokens: int = knob(
        0,
        "tokens that can be taken back exactly (assisted generation)",
        unit="tokens",
        cost="as-computed rows of that many tokens are kept beside the sealed ones",
    )

    def __post_init__(self) -> None:
        self._require("memory_bytes", self.memory_bytes > 0, "a positive number of bytes")
        self._require("kv", self.kv in ("auto", "full", "int8"), "auto, full, int8")
        self._require(
            "block_tokens", self.block_tokens in BLOCK_TOKENS_ALLOWED, ", ".join(map(str, BLOCK_TOKENS_ALLOWED))
        )
        self._require("initial_headroom_ratio", self.initial_headroom_ratio >= 1, "1 or more")
        self._require("growth_factor", self.growth_factor >= 1, "1 or more")
        self._require("min_chunk_tokens", self.min_chunk_tokens > 0, "1 or more")
        self._require("shrink_check_tokens", self.shrink_check_tokens > 0, "1 or more")
        self._require("defrag_interval_requests", self.defrag_interval_requests > 0, "1 or more")
        self._require("maintain_bytes", self.maintain_bytes > 0, "1 or more")
        self._require("cached_idle_s", self.cached_idle_s >= 0, "0 or more")
        self._require("max_rollback_tokens", self.max_rollback_tokens >= 0, "0 or more")
        for name in ("low_free_ratio", "shrink_threshold_ratio", "max_fragmentation_ratio", "cached_share_ratio"):
            self._require(name, 0 <= getattr(self, name) <= 1, "0 to 1")


@dataclass(frozen=True)
class EngineConfig(_Checked):
    """How requests are batched and bounded."""

    max_num_sequences: int = knob(32, "sequences that run at once", unit="sequences")
    max_step_tokens: int = knob(
        512, "tokens of one step: decodes first, then prefill chunks", unit="tokens", cost="larger: slower decodes"
    )
    max_queued_requests: int = knob(1024, "requests that may wait; one more is refused", unit="requests")
    max_new_tokens: int = knob(256, "answer length when a request names none", unit="tokens")

    def __post_init__(self) -> None:
        for name in ("max_num_sequences", "max_step_tokens", "max_queued_requests", "max_new_tokens"):
            self._require(name, getattr(self, name) > 0, "1 or more")
