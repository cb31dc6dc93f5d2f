"""A part of a scenario that must not know what this process has seen: it runs in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

_TIMEOUT_S = 3600


def answer_of(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of this room; the JSON object in the last line that it prints.

    Raises: RuntimeError with its last words where it fails.
    """
    command = [sys.executable, "-m", f"ktransformer2.bench.{module}", *arguments]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the package may lie there without being installed
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=here)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
