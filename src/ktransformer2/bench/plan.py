"""Does `ktransformer plan` tell the truth: its peak beside the peak of a process that does it. Both in own processes.

    python -m ktransformer2.bench.plan MODEL DTYPE KV CONTEXT    loads, reads, answers; prints one JSON object

What is compared is the resident peak as the system counts it (VmHWM): the memory of the process itself, and the pages
of the weight files it has mapped, which are the weights where a file holds them in the type that is computed in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformer2.bench.outcome import BenchOptions, Outcome, say

_NEW_TOKENS = 16
_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Setting:
    """One way to run the model: a text of `context_tokens`, the answer's `_NEW_TOKENS` included."""

    dtype: str
    kv: str
    context_tokens: int


# Products in bfloat16 are slow on processors that have no arithmetic for it: its contexts stay short.
_SETTINGS = (
    Setting("fp32", "full", 512),
    Setting("fp32", "full", 2048),
    Setting("fp32", "full", 8192),
    Setting("fp32", "int8", 512),
    Setting("fp32", "int8", 2048),
    Setting("fp32", "int8", 8192),
    Setting("bf16", "full", 512),
    Setting("bf16", "int8", 512),
)
_QUICK_SETTINGS = (Setting("fp32", "int8", 512),)


def run(options: BenchOptions) -> Outcome:
    """Every setting planned, then measured. Side effects: may download the pinned wheel, unpacks its model once."""
    rows = [_compared(setting, options) for setting in (_QUICK_SETTINGS if options.quick else _settings(options))]
    worst = max(abs(float(str(row["error"]))) for row in rows)
    return Outcome(rows, {"plan_error": worst}, {"new_tokens": _NEW_TOKENS})


def _settings(options: BenchOptions) -> list[Setting]:
    return [setting for setting in _SETTINGS if options.dtype in (None, setting.dtype)]


def _compared(setting: Setting, options: BenchOptions) -> dict[str, object]:
    folder = _model_folder(options, setting.dtype)
    say(f"{setting.dtype}, blocks {setting.kv}, {setting.context_tokens:,} tokens: plan, then load and read")
    common = (folder, "--dtype", setting.dtype, "--kv", setting.kv, "--ctx", str(setting.context_tokens), "--json")
    planned = _in_a_process("ktransformer2.cli", "plan", *common)
    measured = _in_a_process("ktransformer2.bench.plan", folder, setting.dtype, setting.kv, str(setting.context_tokens))
    form = next(form for form in planned["forms"] if form["kv"] == setting.kv)
    peak, seen = planned["peak_bytes"], measured["peak_bytes"]
    return {
        "dtype": setting.dtype,
        "kv": form["form"],
        "context": setting.context_tokens,
        "weights_mb": planned["weight_bytes"] / 1e6,
        "kv_mb": form["kv_bytes"] / 1e6,
        "kv_seen_mb": measured["kv_bytes"] / 1e6,
        "workspace_mb": planned["workspace_bytes"] / 1e6,
        "process_mb": planned["process_bytes"] / 1e6,
        "planned_mb": peak / 1e6,
        "measured_mb": seen / 1e6,
        "error": peak / seen - 1,
    }


def _model_folder(options: BenchOptions, dtype: str) -> str:
    """A folder to load from: the pinned GGUF file unpacked, so that no run pays for unpacking."""
    if options.model is not None:
        return options.model
    from ktransformer2.models.demo import smollm2_from_wheel
    from ktransformer2.models.gguf_conversion import converted
    from ktransformer2.models.loading import chosen_dtype
    from ktransformer2.models.store import cache_directory

    return str(converted(smollm2_from_wheel(cache_directory()), chosen_dtype(dtype)))


def _in_a_process(module: str, *arguments: str) -> dict[str, Any]:
    """What `python -m module` prints, as JSON. Raises RuntimeError with its last words where it fails."""
    command = [sys.executable, "-m", module, *arguments]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the package may lie there without being installed
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=here)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def peak_resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most that was ever resident in this process, mapped files included."""
    if not status.exists():  # no Linux: its count is in bytes there
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _measure(model: str, dtype: str, kv: str, context_tokens: int) -> dict[str, int]:
    from ktransformer2.engine.llm import LLM
    from ktransformer2.engine.sampling import SamplingParams
    from ktransformer2.models.loading import load_model

    loaded = load_model(model, dtype=dtype)
    with LLM(loaded, kv=kv) as llm:
        prompt = [7919 * i % loaded.model.vocab_size for i in range(context_tokens - _NEW_TOKENS)]
        llm.generate([prompt], SamplingParams(max_new_tokens=_NEW_TOKENS))
        return {"peak_bytes": peak_resident_bytes(), "kv_bytes": llm.cache.stats().peak_bytes}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
