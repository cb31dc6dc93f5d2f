"""What `ktransformer doctor` looks at on a machine: one function a question, each with the fix for what it finds.

Reads versions, /proc and /sys, and writes 64 MB into the cache directory; asks the network nothing. Knows no model.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import platform
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ktransformer2.config import format_bytes
from ktransformer2.errors import ConfigError

State = Literal["ok", "note", "PROBLEM"]
_RANGED = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "numpy")
_PROBE_BYTES = 64 * 2**20
_LEAST_FREE_DISK_BYTES = 2 * 10**9  # an unpacked model of 500 million parameters
_LEAST_FREE_MEMORY_BYTES = 10**9
_SLOW_DISK_BYTES_PER_S = 50e6


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `fix` says what to do; a note may have none."""

    name: str
    state: State
    value: str
    fix: str = ""


def checkup() -> list[Check]:
    """Everything, in the order in which it is shown. Side effects: imports torch; writes and removes a file."""
    checks = [settings(), runner(), python(), *packages(), sleeping_threads(), memory(), huge_pages()]
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return [*checks, Check("torch", "PROBLEM", f"cannot be imported ({error})", "install it again")]
    checks += [processor(), kernels(), threads(), runtimes()]
    from ktransformer2.models.store import cache_directory

    try:
        checks.append(disk(cache_directory()))
    except ConfigError as error:
        checks.append(Check("cache directory", "PROBLEM", str(error), "name a writable one with KTRANSFORMER_CACHE"))
    return checks


def settings() -> Check:
    from ktransformer2 import settings

    try:
        found = settings.resolve()
    except ConfigError as error:
        return Check("settings", "PROBLEM", str(error), "mend it; `ktransformer config check` looks again")
    changed = [name for name, origin in found.origins.items() if origin != settings.DEFAULT]
    return Check("settings", "ok", f"{', '.join(changed)} set" if changed else "all defaults")


def runner() -> Check:
    """Which models take which path, as the sweep over all architectures found it."""
    from ktransformer2 import settings
    from ktransformer2.bench.models_page import read_list

    try:
        chosen = settings.resolve().values["runner"]
    except ConfigError:
        return Check("runner", "note", "not known while the settings are wrong")
    lean = ", ".join(row["model_type"] for row in read_list()["architectures"] if row["runner"] == "lean")
    words = {
        "auto": f"lean for {lean}; the modules of transformers for all other models",
        "lean": f"{lean}; other models are refused",
        "transformers": "the modules of transformers for every model, though lean is faster where it fits",
    }
    if chosen not in words:
        return Check("runner", "PROBLEM", f"{chosen!r} is not allowed", f"name one of {', '.join(words)}")
    return Check("runner", "ok", words[chosen])


def python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def packages() -> list[Check]:
    """This package and those whose range matters."""
    from ktransformer2 import __version__

    try:
        wanted = importlib.metadata.requires("ktransformer2") or []
    except importlib.metadata.PackageNotFoundError:
        here = Check("ktransformer2", "note", f"{__version__}, not installed", "`pip install .` checks versions too")
        return [here, *(package(name, "") for name in _RANGED[:2])]
    ranges = _ranges(wanted)
    return [Check("ktransformer2", "ok", __version__), *(package(name, ranges.get(name, "")) for name in _RANGED)]


def _ranges(requirements: Iterable[str]) -> dict[str, str]:
    from packaging.requirements import Requirement

    parsed = [Requirement(line) for line in requirements]
    return {each.name: str(each.specifier) for each in parsed if each.marker is None}


def package(name: str, wanted: str) -> Check:
    """`wanted` is a range such as ">=2.8"; empty: any."""
    from packaging.specifiers import SpecifierSet

    fix = f'pip install "{name}{wanted}"'
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "PROBLEM", "not installed", fix)
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        return Check(name, "PROBLEM", f"{version}, promised is {wanted}", fix)
    return Check(name, "ok", version)


def processor() -> Check:
    from ktransformer2.bench.environment import cpuinfo

    name, flags = cpuinfo()
    bf16 = bool({"avx512_bf16", "amx_bf16"} & set(flags)) or "avx2" not in flags
    note = "" if bf16 else "; no bf16 arithmetic: models are computed in float32"
    return Check("processor", "ok", f"{name}: {' '.join(flags) or 'no flags known'}{note}")


def kernels() -> Check:
    """Which backend computes. A forced one that is slower, or none but the oracle, is a problem."""
    from ktransformer2.kernels.attention import ENVIRONMENT_VARIABLE, available_backends, backend_name

    available = available_backends()
    value = f"available: {', '.join(available)}"
    try:
        name = backend_name()
    except ConfigError as error:
        return Check("kernels", "PROBLEM", str(error), f"unset {ENVIRONMENT_VARIABLE}")
    if name != available[0]:
        fix = f"unset {ENVIRONMENT_VARIABLE}: {available[0]} is faster"
        return Check("kernels", "PROBLEM", f"{name}; {value}", fix)
    if name == "reference":
        fix = "have a C++ compiler at hand (apt install g++, or Xcode's) and install the package again"
        return Check("kernels", "PROBLEM", "reference: the native kernels are not built, all is slow", fix)
    return Check("kernels", "ok", f"{name}; {value}")


def usable_processors(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many processors this process may keep busy: its affinity, and its control group's share of time."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):  # no such group here: it sets no limit
        return count
    return count if quota == "max" else max(1, min(count, math.ceil(int(quota) / int(period))))


def threads(usable: int | None = None) -> Check:
    import torch

    used, usable = torch.get_num_threads(), usable or usable_processors()
    value = f"{used} of {usable} usable processors"
    if used > usable:
        return Check("threads", "PROBLEM", f"{used} on {usable} usable processors", f"export OMP_NUM_THREADS={usable}")
    if used < usable:
        return Check("threads", "note", value, "unset OMP_NUM_THREADS, or raise it, to use them all")
    return Check("threads", "ok", value)


def sleeping_threads(environ: Mapping[str, str] = os.environ) -> Check:
    """OpenMP threads that sleep between two kernels wake up too late for the next one."""
    slow = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    found = [name for name, value in slow.items() if environ.get(name, "").lower() == value]
    if found:
        words = ", ".join(f"{name}={environ[name]}" for name in found)
        return Check("OpenMP waiting", "PROBLEM", f"{words}: every kernel starts late", f"unset {' '.join(found)}")
    return Check("OpenMP waiting", "ok", "active")


def runtimes(maps: Path = Path("/proc/self/maps")) -> Check:
    """How many OpenMP runtimes torch and the kernels have brought into this process."""
    import torch  # noqa: F401  # it is looked at what this loads

    from ktransformer2.kernels.attention import available_backends

    available_backends()  # loads the extension, where there is one
    if not maps.exists():
        return Check("OpenMP runtimes", "note", "this system does not say")
    files = {line.split()[-1] for line in maps.read_text().splitlines() if len(line.split()) > 5}
    found = sorted(file for file in files if any(name in Path(file).name for name in ("gomp", "libomp", "iomp")))
    if len(found) > 1:
        fix = "install torch and this package into one fresh environment"
        return Check("OpenMP runtimes", "PROBLEM", f"{len(found)} at once: {', '.join(found)}", fix)
    return Check("OpenMP runtimes", "ok", Path(found[0]).name if found else "none")


def memory() -> Check:
    from ktransformer2.engine.memory_budget import Memory

    have = Memory.measure()
    limit = have.cgroup_limit_bytes
    words = f"{format_bytes(have.available_bytes)} available"
    words += f", limited to {format_bytes(limit)} by the control group" if limit is not None else ""
    if min(have.available_bytes, limit or have.available_bytes) < _LEAST_FREE_MEMORY_BYTES:
        return Check("memory", "PROBLEM", words, "stop other programs, or raise the limit; a small model needs 1 GB")
    return Check("memory", "ok", words)


def huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Check:
    """Whether the arena may ask for transparent huge pages."""
    if not path.exists():
        return Check("huge pages", "note", "this system has none to ask for")
    mode = path.read_text().partition("[")[2].partition("]")[0]
    if mode == "never":
        return Check("huge pages", "note", "switched off", f"echo madvise | sudo tee {path}")
    return Check("huge pages", "ok", mode)


def disk(directory: Path, num_bytes: int = _PROBE_BYTES) -> Check:
    """Write `num_bytes` into a new file with fsync, read them back from the disk, remove it."""
    free = shutil.disk_usage(directory).free
    where = f"{directory}, {format_bytes(free)} free"
    if free < max(_LEAST_FREE_DISK_BYTES, 2 * num_bytes):
        fix = "make room (`ktransformer models rm NAME`), or name another with KTRANSFORMER_CACHE"
        return Check("cache directory", "PROBLEM", where, fix)
    try:
        written_s, read_s = _disk_seconds(directory / f".doctor-{os.getpid()}", num_bytes)
    except OSError as error:
        fix = "allow it, or name another with KTRANSFORMER_CACHE"
        return Check("cache directory", "PROBLEM", f"{directory} cannot be used ({error})", fix)
    speed = f"{where}; writes {format_bytes(num_bytes / written_s)}/s, reads {format_bytes(num_bytes / read_s)}/s"
    if num_bytes / min(written_s, read_s) < _SLOW_DISK_BYTES_PER_S:
        return Check("cache directory", "PROBLEM", f"{speed}: slow", "name a faster one with KTRANSFORMER_CACHE")
    return Check("cache directory", "ok", speed)


def _disk_seconds(path: Path, num_bytes: int) -> tuple[float, float]:
    """(seconds to write, seconds to read). Side effect: the file is made and removed."""
    piece = os.urandom(2**20)
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(num_bytes // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # else the page cache would be read
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(2**20):
                pass
        return written - began, time.perf_counter() - written
    finally:
        path.unlink(missing_ok=True)
