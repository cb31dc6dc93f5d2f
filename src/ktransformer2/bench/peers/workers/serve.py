"""The peer's end of the protocol: it loads a worker file and answers JSON lines. Standard library only.

    python -P serve.py WORKER_FILE

{"do": "load", ...} comes first, then the operations that `workers/__init__.py` lists, then {"do": "quit"}. Every line
is answered by {"ok": ..., "peak_bytes": ...} or {"error": ..., "peak_bytes": ...}. Invariant: nothing but answers
reaches stdout; what a library prints there goes to stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

OPERATIONS = ("read", "decode", "batch", "save", "restore")


def load(path: Path, options: dict[str, Any]) -> Any:
    """The `Peer` of a worker file, its model loaded."""
    spec = importlib.util.spec_from_file_location("worker", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Peer(**options)


def peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most that was ever resident in this process. `getrusage` would count the parent's, from before the exec."""
    if not status.exists():  # no Linux: bytes there
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def decode(peer: Any, count: int) -> dict[str, Any]:
    """Seconds of each step, and the tokens."""
    seconds: list[float] = []
    tokens: list[int] = []
    while len(tokens) < count:
        began = time.perf_counter()
        tokens += peer.step()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "tokens": tokens}


def perform(peer: Any, what: str, asked: dict[str, Any]) -> Any:
    if what == "decode" and hasattr(peer, "step"):
        return decode(peer, **asked)
    if what not in OPERATIONS or not hasattr(peer, what):
        raise LookupError(f"this peer has no operation {what!r}")
    return getattr(peer, what)(**asked)


def main(path: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer: Any = None
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        what = asked.pop("do")
        if what == "quit":
            break
        try:
            if what == "load":
                peer = load(path, asked)
                answer = {"ok": peer.about()}
            else:
                answer = {"ok": perform(peer, what, asked)}
        except Exception as error:  # whatever a peer's library may raise: the host names it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer | {"peak_bytes": peak_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
