"""Every knob, with its effect, unit, default and cost. Frozen and checked at load. Knows no other room.

A knob that has another name in the design it came from keeps that name in its metadata (`seed`). `chosen_by` says what
chose the default: a row of a bench that compares it with other values (`bench memory --part knobs` and `--part limits`,
whose last runs are benchmarks/results/knobs.json and limits.json), a bench's key, or why there is none: nothing is
done that nobody asked for, there is nothing to default to, the processor decides, the value is a limit for safety, or
it is a wish of the user that no run can know. "alike": the row does not tell the values apart; "beaten by": it says
that another is better. "held by" names the key of a bench that would show the default broken, which is less than
having chosen it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeGuard

from ktransformer2.errors import ConfigError
from ktransformer2.layout import BLOCK_TOKENS_ALLOWED

# 64 TiB: more than any machine has, and eight times as many addresses still fit a pointer. No other count is larger.
MAX_MEMORY_BYTES = 2**46
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)
_TOKENS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KM]?)\s*", re.IGNORECASE)
_MAX_RATIO = 1000.0
WRITE_POLICIES = ("write_through_selective", "write_through", "write_back")
REPLACEMENTS = ("lru", "lfu", "s3fifo", "arc", "hazard", "adaptive")
# What chose a default, where no measurement did.
_OFF, _LIMIT, _WISH = "off unless asked for", "a limit, for safety", "the user's wish"
_FIRST_DESIGN = "the design this project began with"
_ROW, _LIMITS_ROW = "bench memory --part knobs: ", "bench memory --part limits: "
_NO_LONGER_TRACE = "the traces hold no pause longer than a day"


def parse_bytes(size: str | int) -> int:
    """Bytes from `"4GB"`, `"512MiB"`, `"1.5G"` or a whole number. Raises ConfigError for anything else, "1.5" too."""
    return _parse(size, _SIZE, _UNITS, "size {} is not understood; write a number with a unit, such as 4GB or 512MiB")


def parse_tokens(count: str | int) -> int:
    """Tokens from `"32k"` (32 x 1,024), `"8192"` or a whole number. Raises ConfigError for anything else."""
    units = {"": 1, "K": 1024, "M": 1024**2}
    return _parse(count, _TOKENS, units, "token count {} is not understood; write a number such as 8192 or 32k")


def _parse(written: object, pattern: re.Pattern[str], units: Mapping[str, int], refusal: str) -> int:
    value: float
    if _is_whole(written):
        value = written
    elif isinstance(written, str) and (found := pattern.fullmatch(written)) and (found[2] or "." not in found[1]):
        value = float(found[1]) * units[found[2].upper()]
    else:
        raise ConfigError(refusal.format(_shown(written)))
    if not 0 <= value <= MAX_MEMORY_BYTES:
        raise ConfigError(f"{_shown(written)} is not allowed; allowed: 0 to {MAX_MEMORY_BYTES} (2^46)")
    return int(value)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A wrong value as a message shows it: long ones cut, numbers of more digits than Python prints too."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def format_bytes(num_bytes: float) -> str:
    """Bytes with a decimal unit and three digits: 95.3 MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * size:  # what rounds to one of this unit is not a thousand of the next
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def knob(default: Any, effect: str, **about: str) -> Any:
    """A dataclass field that documents itself: `unit`, `cost`, `seed` and `chosen_by` beside its effect."""
    assert not set(about) - {"unit", "cost", "seed", "chosen_by"}, f"unknown metadata: {sorted(about)}"
    return field(default=default, metadata={"effect": effect, **about})


class _Checked:
    """Loading with a named error for an unknown key; the type of every field, then ranges, checked once made."""

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Self:
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]  # the subclasses are dataclasses
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown setting {key!r}{hint}")
        return cls(**values)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]  # the subclasses are dataclasses
            fits, allowed = _TYPES[f.type]
            self._require(f.name, fits(getattr(self, f.name)), allowed)
        self._check_ranges()

    def _check_ranges(self) -> None:
        raise NotImplementedError

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{name}={_shown(getattr(self, name))} is not allowed; allowed: {allowed}")

    def _require_at_least(self, least: int, *names: str) -> None:
        for name in names:
            self._require(name, getattr(self, name) >= least, f"{least} or more")

    def _require_between(self, low: float, high: float, *names: str) -> None:
        for name in names:
            self._require(name, low <= getattr(self, name) <= high, f"{low:g} to {high:g}")


def _is_count(value: object) -> bool:
    return _is_whole(value) and abs(value) <= MAX_MEMORY_BYTES


def _is_number(value: object) -> bool:
    return _is_count(value) or (isinstance(value, float) and math.isfinite(value))


# What a field's annotation asks of its value, in code and in words.
_TYPES: dict[Any, tuple[Callable[[object], bool], str]] = {
    "int": (_is_count, "a whole number up to 2^46"),
    "float": (_is_number, "a finite number"),
    "str": (lambda value: isinstance(value, str), "a text"),
}


@dataclass(frozen=True)
class CacheConfig(_Checked):
    """How the cache grows, shrinks, keeps and holds. `memory_bytes` is the hard limit over everything it counts."""

    memory_bytes: int = knob(
        4 * 10**9,
        "hard limit over K, V, scales, tables and copies in flight",
        unit="bytes",
        cost="less memory: fewer cached prefixes, more waiting",
        chosen_by=_LIMIT,
    )
    kv: str = knob(
        "auto",
        "form of full blocks: auto (int8 in every layer), full (the model's precision) or int8",
        cost="int8: answers near those of full precision, not the same",
        chosen_by="bench decode: kv_bytes_vs_fp16; held by bench fidelity: kl_int8, top1_int8",
    )
    block_tokens: int = knob(
        64,
        "tokens of one block: the unit of sharing, sealing and moving",
        unit="tokens",
        cost="larger: more waste in the last block; smaller: more table entries",
        chosen_by=f"{_ROW}block_tokens",
    )
    initial_headroom_ratio: float = knob(
        1.2,
        "committed memory at the first growth, relative to what is asked",
        unit="ratio",
        seed="GROWTH_FACTOR 1.2x",
        chosen_by=f"{_FIRST_DESIGN}; alike in {_ROW}initial_headroom_ratio",
    )
    low_free_ratio: float = knob(
        0.20,
        "growth is due when less than this share of a chunk is free",
        unit="ratio",
        seed="20 %",
        chosen_by=f"{_ROW}low_free_ratio",
    )
    growth_factor: float = knob(
        1.5,
        "each growth in a row is larger by this factor, within its bound",
        unit="ratio",
        seed="GROWTH_FACTOR",
        chosen_by=f"{_LIMITS_ROW}growth_factor",
    )
    shrink_threshold_ratio: float = knob(
        0.5,
        "a shrink is due when less than this share of the newest chunks is used",
        unit="ratio",
        seed="SHRINK_THRESHOLD",
        chosen_by=f"{_ROW}shrink_threshold_ratio",
    )
    shrink_check_tokens: int = knob(
        100,
        "tokens between two shrink checks",
        unit="tokens",
        seed="each 100 tokens",
        chosen_by=f"{_ROW}shrink_check_tokens",
    )
    min_chunk_tokens: int = knob(
        256,
        "smallest step of growth",
        unit="tokens",
        seed="MIN_CHUNK_SIZE",
        cost="larger: fewer steps, more waste",
        chosen_by=f"{_ROW}min_chunk_tokens",
    )
    defrag_interval_requests: int = knob(
        1000,
        "defragment at the latest after this many finished requests",
        unit="requests",
        seed="DEFRAG_INTERVAL",
        chosen_by=f"{_FIRST_DESIGN}; alike in {_ROW}defrag_interval_requests",
    )
    max_fragmentation_ratio: float = knob(
        0.30,
        "defragment when 1 - largest free run / free passes this",
        unit="ratio",
        seed="fragmentation 30 %",
        chosen_by=f"{_ROW}max_fragmentation_ratio",
    )
    maintain_bytes: int = knob(
        8 * 2**20,
        "bytes that maintain() may copy between two steps",
        unit="bytes",
        cost="larger: longer pauses",
        chosen_by=f"{_LIMITS_ROW}maintain_bytes; held by bench memory: step_p99_over_p50_vs_control",
    )
    cached_share_ratio: float = knob(
        0.5,
        "share of the limit that blocks without a user may keep",
        unit="ratio",
        cost="larger: more reuse; such blocks leave anyway when room is needed",
        chosen_by=f"{_ROW}cached_share_ratio",
    )
    pinned_share_ratio: float = knob(
        0.25,
        "share of the limit that pinned blocks may hold",
        unit="ratio",
        cost="larger: more stays whatever comes; what is pinned is no room for anything else",
        chosen_by=_LIMIT,
    )
    replacement: str = knob(
        "adaptive",
        "which block without a user leaves first: lru, lfu, s3fifo, arc, hazard, adaptive",
        cost="adaptive: more reuse where conversations end, for some microseconds a block used; lru: the least work",
        chosen_by="bench policy: gap_closed_chat_2pct",
    )
    cached_idle_s: float = knob(
        300.0,
        "blocks without a user are freed after this long",
        unit="seconds",
        cost="longer: more reuse after a pause, memory held meanwhile",
        chosen_by=f"{_LIMITS_ROW}cached_idle_s",
    )
    max_rollback_tokens: int = knob(
        0,
        "tokens that can be taken back exactly (assisted generation)",
        unit="tokens",
        cost="as-computed rows of that many tokens are kept beside the sealed ones",
        chosen_by=_OFF,
    )

    def _check_ranges(self) -> None:
        self._require("kv", self.kv in ("auto", "full", "int8"), "auto, full, int8")
        self._require(
            "block_tokens", self.block_tokens in BLOCK_TOKENS_ALLOWED, ", ".join(map(str, BLOCK_TOKENS_ALLOWED))
        )
        self._require_at_least(
            1, "memory_bytes", "min_chunk_tokens", "shrink_check_tokens", "defrag_interval_requests", "maintain_bytes"
        )
        self._require("replacement", self.replacement in REPLACEMENTS, ", ".join(REPLACEMENTS))
        self._require_at_least(0, "cached_idle_s", "max_rollback_tokens")
        self._require_between(1, _MAX_RATIO, "initial_headroom_ratio", "growth_factor")
        self._require_between(
            0, 1, "low_free_ratio", "shrink_threshold_ratio", "max_fragmentation_ratio", "cached_share_ratio"
        )
        self._require_between(0, 1, "pinned_share_ratio")


@dataclass(frozen=True)
class EngineConfig(_Checked):
    """How requests are batched and bounded."""

    max_num_sequences: int = knob(
        32,
        "sequences that run at once",
        unit="sequences",
        cost="more: each is slower, and memory is shared by more",
        chosen_by=f"{_LIMITS_ROW}max_num_sequences",
    )
    max_step_tokens: int = knob(
        512,
        "tokens of one step: decodes first, then prefill chunks",
        unit="tokens",
        cost="larger: slower decodes",
        chosen_by=f"{_LIMIT}: how long a step may keep a running answer waiting",
    )
    max_queued_requests: int = knob(
        1024, "requests that may wait; one more is refused", unit="requests", chosen_by=_LIMIT
    )
    max_new_tokens: int = knob(256, "answer length when a request names none", unit="tokens", chosen_by=_LIMIT)

    def _check_ranges(self) -> None:
        self._require_at_least(1, "max_num_sequences", "max_step_tokens", "max_queued_requests", "max_new_tokens")


@dataclass(frozen=True)
class TierConfig(_Checked):
    """What lies below the device, and what goes there. Nothing, unless it is asked for; the command line asks."""

    persist: str = knob(
        "auto",
        "keep blocks on disk for the next process: on, off, or auto (on in the command line, off in the library)",
        cost="on: what prompts said can be told from the files by whoever may read them",
        chosen_by=f"{_OFF}: a library writes nothing that it was not told to",
    )
    disk_directory: str = knob(
        "", "where blocks lie on disk; empty: a folder of the user's cache directory", chosen_by=_WISH
    )
    disk_bytes: int = knob(
        8 * 10**9,
        "hard limit of that directory, over all models and processes",
        unit="bytes",
        cost="larger: more reuse, more disk",
        chosen_by=_LIMIT,
    )
    disk_ttl_s: float = knob(
        7 * 86_400.0,
        "blocks on disk are forgotten this long after their last use; 0: never",
        unit="seconds",
        cost="longer: more reuse after a pause, prompts lie there meanwhile",
        chosen_by=f"{_WISH}: {_NO_LONGER_TRACE}; beaten by 86400 in {_LIMITS_ROW}disk_ttl_s",
    )
    host_bytes: int = knob(
        0,
        "memory for blocks that left the device, beside memory_bytes; 0: none",
        unit="bytes",
        cost="worth it under a device with memory of its own",
        chosen_by=_OFF,
    )
    valkey_url: str = knob(
        "",
        "a server that shares blocks, such as valkeys://user:password@host:6379/0; empty: none",
        cost="whoever may read the server can read what prompts said",
        chosen_by=_OFF,
    )
    valkey_key_file: str = knob(
        "",
        "a file with the key that signs blocks on the server; empty: the variable KTRANSFORMER_VALKEY_KEY has it",
        chosen_by="no default",
    )
    valkey_ttl_s: float = knob(
        7 * 86_400.0,
        "the server forgets a block this long after its last use",
        unit="seconds",
        chosen_by=f"{_WISH}: {_NO_LONGER_TRACE}; beaten by 86400 in {_LIMITS_ROW}valkey_ttl_s",
    )
    bloom_refresh_s: float = knob(
        30.0,
        "how often it is looked what others have written to a shared tier",
        unit="seconds",
        cost="shorter: fewer of their blocks are missed, more traffic",
        chosen_by=f"{_WISH}: how fresh, for how much traffic",
    )
    write_policy: str = knob(
        "write_through_selective",
        "when a block is written: once a prompt found it (write_through_selective), once it is full (write_through), "
        "or when it leaves the device (write_back); at an orderly end all are",
        cost="write_through: more is written than is read again",
        chosen_by=f"{_WISH}: how much a crash may lose; held by bench tiers: writer_cpu_share",
    )
    staging_bytes: int = knob(
        64 * 2**20,
        "copies in flight, down and up each, at most an eighth of memory_bytes; they count against it",
        unit="bytes",
        cost="smaller: less is written at once, blocks come up in smaller pieces",
        chosen_by=f"{_LIMIT}; held by bench tiers: median_transfer_bytes",
    )
    flush_s: float = knob(
        10.0,
        "how long closing may take to write what is left",
        unit="seconds",
        cost="shorter: less is there after a restart",
        chosen_by=_LIMIT,
    )

    def _check_ranges(self) -> None:
        self._require("persist", self.persist in ("auto", "on", "off"), "auto, on, off")
        self._require("write_policy", self.write_policy in WRITE_POLICIES, ", ".join(WRITE_POLICIES))
        self._require_at_least(1, "disk_bytes", "staging_bytes")
        self._require_at_least(0, "disk_ttl_s", "host_bytes", "flush_s")
        self._require_between(1, 86_400, "bloom_refresh_s")
        self._require_between(1, 3650 * 86_400, "valkey_ttl_s")
