"""The host's end of the protocol: one worker process, asked one thing at a time, its answers checked.

A peer that does not start, ends, is too slow or says what cannot be is a `PeerError` with its last words; its process
is gone then. Knows no peer. Invariant: what a worker says it took fits into what the host saw pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOADING_S = ANSWER_S = 900.0
_END_S = 10.0
_LAST_WORDS = 600
_SERVE = Path(__file__).parent / "workers" / "serve.py"


class PeerError(RuntimeError):
    """A peer failed; the message says how, and ends with what it wrote last."""


@dataclass(frozen=True)
class Read:
    """A prompt was read: seconds to the first token behind it, that token, and tokens that were known already."""

    first_s: float
    token: int
    reused: int | None


class PeerProcess:
    """A worker that has loaded its model. Used as a context, or closed."""

    def __init__(
        self,
        python: Path | str,
        worker: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        loading_s: float = LOADING_S,
    ) -> None:
        """Start it and wait until it is loaded. Raises: PeerError."""
        self.peak_bytes = 0
        self._unread = b""
        self._open = contextlib.ExitStack()
        self._log = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (it is: until `close`)
        command = [str(python), "-P", str(_SERVE), str(worker)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(environment),
                bufsize=0,
            )
        except OSError as error:
            self._open.close()
            raise PeerError(f"it cannot be started ({error})") from error
        self._open.enter_context(self._process)  # closes its pipes
        self.about: dict[str, Any] = self._ask("load", loading_s, **options)

    def read(self, ids: Sequence[int], room: int = 0, reuse: bool = False) -> Read:
        """The prompt, `room` tokens to be asked for behind it. Raises: PeerError."""
        began = time.perf_counter()
        found = self._ask("read", ANSWER_S, ids=list(ids), room=room, reuse=reuse)
        self._check_seconds([found["first_s"]], 1, time.perf_counter() - began)
        return Read(found["first_s"], found["token"], found.get("reused"))

    def decode(self, count: int) -> list[float]:
        """Seconds of each of `count` further tokens. Raises: PeerError."""
        began = time.perf_counter()
        found = self._ask("decode", ANSWER_S, count=count)
        self._check_seconds(found["seconds"], count, time.perf_counter() - began)
        self._check_count("decode", found["tokens"], count)
        return [float(each) for each in found["seconds"]]

    def batch(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Seconds until every prompt has its `count` tokens. Raises: PeerError."""
        began = time.perf_counter()
        found = self._ask("batch", ANSWER_S, prompts=[list(prompt) for prompt in prompts], count=count)
        self._check_seconds([found["seconds"]], 1, time.perf_counter() - began)
        self._check_count("batch", found["tokens"], len(prompts))
        for tokens in found["tokens"]:
            self._check_count("batch", tokens, count)
        return float(found["seconds"])

    def save(self, path: Path) -> dict[str, Any]:
        """What was read, into a file. Raises: PeerError, also where the peer cannot."""
        found: dict[str, Any] = self._ask("save", ANSWER_S, path=str(path))
        return found

    def restore(self, path: Path) -> dict[str, Any]:
        """What another process saved; `read(..., reuse=True)` goes on from it. Raises: PeerError."""
        found: dict[str, Any] = self._ask("restore", ANSWER_S, path=str(path))
        return found

    def close(self) -> None:
        """Ask it to end, and end it where it does not. Twice is once."""
        if self._log.closed:
            return
        try:
            self._put({"do": "quit"})
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._open.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: str, limit_s: float, **asked: Any) -> Any:
        self._put({"do": what, **asked})
        answer = self._answer(what, limit_s)
        self.peak_bytes = answer["peak_bytes"]
        if "error" in answer:
            self._fail(f"{what}: {answer['error']}", words=False)
        return answer["ok"]

    def _put(self, asked: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: so the answer, which does not come, says
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")

    def _answer(self, what: str, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                self._fail(f"{what}: no answer after {limit_s:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                self._fail(f"{what}: it has ended with {self._process.wait(_END_S)}")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _check_seconds(self, seconds: Sequence[float], count: int, passed: float) -> None:
        self._check_count("seconds", seconds, count)
        if min(seconds) <= 0 or sum(seconds) > passed:
            self._fail(
                f"it says it took {sum(seconds):.4g} s, of which each must be above 0, while {passed:.4g} s passed"
            )

    def _check_count(self, what: str, found: Sequence[object], count: int) -> None:
        if len(found) != count:
            self._fail(f"{what}: {len(found)} came back, {count} were asked for")

    def _fail(self, why: str, words: bool = True) -> None:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LAST_WORDS))
        last = " ".join(self._log.read().decode(errors="replace").split()) if words else ""
        if self._process.poll() is None:
            self._process.kill()
        self.close()
        raise PeerError(why + (f"; its last words: {last}" if last else ""))
