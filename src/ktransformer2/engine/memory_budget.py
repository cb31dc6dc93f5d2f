"""How much memory `memory="auto"` is: 0.8 x (min(cgroup limit, available) - weights - workspace), within bounds.

The rules are pure, and `plan` uses the same; two small readers ask the system. Knows no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ktransformer2.config import EngineConfig
from ktransformer2.errors import OutOfMemoryError
from ktransformer2.layout import ModelGeometry

if TYPE_CHECKING:
    from ktransformer2.models.footprint import ModelFootprint

_SHARE = 0.8
# Below this a cache holds no useful prompt of any real model; better said at the start than at the first request.
_MIN_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Memory:
    """What this process may still take, measured before the weights are loaded. `cgroup_limit_bytes` None: no limit."""

    available_bytes: int
    cgroup_limit_bytes: int | None = None

    @classmethod
    def measure(cls) -> Memory:
        return cls(int(psutil.virtual_memory().available), cgroup_limit_bytes())

    def less(self, num_bytes: int) -> Memory:
        """What is left where so many bytes are taken for something else."""
        limit = self.cgroup_limit_bytes
        return Memory(self.available_bytes - num_bytes, None if limit is None else limit - num_bytes)

    @property
    def usable_bytes(self) -> int:
        limit = self.cgroup_limit_bytes
        return self.available_bytes if limit is None else min(self.available_bytes, limit)


def auto_memory_bytes(memory: Memory, weight_bytes: int, workspace_bytes: int, most_bytes: int) -> int:
    """The cache's limit in bytes, at most what it could ever use.

    Raises: OutOfMemoryError when nothing useful is left.
    """
    budget = spare_bytes(memory, weight_bytes, workspace_bytes)
    if budget < _MIN_BYTES:
        raise OutOfMemoryError(
            f"memory='auto' finds {memory.usable_bytes / 1e6:.0f} MB, of which weights take {weight_bytes / 1e6:.0f} "
            f"and workspace {workspace_bytes / 1e6:.0f} MB: {budget / 1e6:.0f} MB for the cache, at least "
            f"{_MIN_BYTES / 1e6:.0f} are needed. Free memory, take a smaller model, or name memory= yourself; "
            "`ktransformer plan MODEL` shows what it needs"
        )
    return min(budget, most_bytes)


def spare_bytes(memory: Memory, weight_bytes: int, workspace_bytes: int) -> int:
    """The share of what weights and workspace leave; 0: they leave nothing."""
    return max(0, int(_SHARE * (memory.usable_bytes - weight_bytes - workspace_bytes)))


def workspace_bytes(footprint: ModelFootprint, config: EngineConfig, num_rows: int | None = None) -> int:
    """Activations and logits of the largest step, and the tokenizer. `num_rows`: all tokens there are, if that is less
    than a step takes.
    """
    rows = config.max_step_tokens if num_rows is None else min(num_rows, config.max_step_tokens)
    return footprint.step_bytes(rows, config.max_num_sequences) + footprint.vocabulary_bytes


def most_useful_bytes(geometry: ModelGeometry, config: EngineConfig) -> int:
    """What the cache could ever use: every sequence at the model's full context, and as much again kept for later."""
    per_token = sum(group.elements_per_token for group in geometry.groups) * geometry.full_form.element_bytes
    return max(_MIN_BYTES, 2 * config.max_num_sequences * geometry.max_positions * per_token)


def cgroup_limit_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The tightest memory limit of this process's control groups (v2 and v1); None: no limit, or no such system."""
    limits = [_read_limit(path) for path in _limit_files(root, own)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_files(root: Path, own: Path) -> list[Path]:
    """Limit files of the process's groups and all their ancestors; a container sees its own group as the root."""
    files = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        group = base / path.lstrip("/")
        while group != base:
            files.append(group / name)
            group = group.parent
    return files


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such group here: it sets no limit
        return None
    # v1 writes "no limit" as the largest page-aligned number.
    return int(text) if text.isdigit() and int(text) < 2**60 else None
