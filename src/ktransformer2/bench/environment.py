"""What a figure was measured under: versions, processor, threads, kernels, every setting. Changes nothing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.kernels import attention

_PACKAGES = ("ktransformer2", "torch", "transformers", "numpy", "nanobind", "gguf")
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpuinfo(path: Path = Path("/proc/cpuinfo")) -> tuple[str, list[str]]:
    """(processor name, those of its flags that matter to a kernel). Only Linux says more than a name."""
    if not path.exists():
        return platform.processor() or platform.machine(), []
    lines = [line.split(":", 1) for line in path.read_text().splitlines() if ":" in line]
    values = {key.strip(): value.strip() for key, value in lines}
    flags = set(values.get("flags", "").split())
    return values.get("model name", platform.machine()), [flag for flag in _FLAGS if flag in flags]


def commit() -> str:
    """The commit of the checkout this file lies in, `+` where files differ from it; empty outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")
    except FileNotFoundError:  # no git program here
        return ""


def describe(cache: CacheConfig | None = None, engine: EngineConfig | None = None) -> dict[str, object]:
    """Everything needed to read a figure again later. Defaults stand for the shipped ones."""
    name, flags = cpuinfo()
    return {
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}},
        "commit": commit(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": name,
        "processor_flags": flags,
        "processors_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": attention.backend_name(),
        "cache_config": dataclasses.asdict(cache or CacheConfig()),
        "engine_config": dataclasses.asdict(engine or EngineConfig()),
    }
