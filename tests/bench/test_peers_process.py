"""The protocol with a worker, against workers that are well, slow, crash, lie, or do not start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ktransformer2.bench.peers import process
from ktransformer2.bench.peers.process import PeerError, PeerProcess, Read
from ktransformer2.bench.peers.workers import serve

# One worker for all tests: `fault` names what is wrong with it. It prints where answers go, as libraries do.
FAKE = """
import os, signal
class Peer:
    def __init__(self, fault=""):
        print("loading", flush=True)
        os.write(1, b"a library writes here\\n")
        self.fault = fault
        if fault == "does not load":
            raise ValueError("no such model")
        if fault == "dies while loading":
            os.write(2, b"out of  memory\\n")
            os._exit(3)
        if fault == "never loads":
            signal.pause()
    def about(self):
        return {"version": "fake 1"}
    def read(self, ids, room, reuse):
        if self.fault == "slow":
            signal.pause()
        took = {"lies about time": 1000.0, "takes no time": 0.0}.get(self.fault, 1e-7)
        return {"first_s": took, "token": ids[-1] + room, "reused": len(ids) if reuse else 0}
    def decode(self, count):
        if self.fault == "dies":
            os._exit(4)
        tokens = list(range(count - (self.fault == "lies about tokens")))
        return {"seconds": [1e-7] * (count - (self.fault == "lies about seconds")), "tokens": tokens}
    def batch(self, prompts, count):
        rows = [[0] * count for _ in prompts]
        if self.fault == "forgets a token":
            rows[-1].pop()
        if self.fault == "forgets a prompt":
            rows.pop()
        return {"seconds": 1e-6, "tokens": rows}
    def save(self, path):
        open(path, "w").write("kept")
        return {"bytes": 4}
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


@pytest.fixture
def well(worker: Path) -> Iterator[PeerProcess]:
    with started(worker) as peer:
        yield peer


def started(worker: Path, fault: str = "") -> PeerProcess:
    return PeerProcess(sys.executable, worker, {"fault": fault}, {})


def test_a_worker_answers(well: PeerProcess, tmp_path: Path) -> None:
    assert well.about == {"version": "fake 1"}
    assert well.read([5, 6], room=10) == Read(1e-7, 16, 0)
    assert well.read([5, 6], reuse=True) == Read(1e-7, 6, 2)
    assert well.decode(3) == [1e-7] * 3
    assert well.batch([[1], [2, 3]], 4) == 1e-6
    assert well.save(tmp_path / "kept") == {"bytes": 4}
    assert (tmp_path / "kept").read_text() == "kept"
    assert 2 * 10**6 < well.peak_bytes < 10**9


def test_a_long_prompt_and_a_long_answer_come_whole(well: PeerProcess) -> None:
    assert well.read(list(range(100_000))).token == 99_999
    assert len(well.decode(100_000)) == 100_000


def test_what_a_peer_cannot_do_is_named(well: PeerProcess, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"^restore: LookupError: this peer has no operation 'restore'$"):
        well.restore(tmp_path / "kept")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("does not load", "^load: ValueError: no such model$"),
        ("dies while loading", r"^load: it has ended with 3; its last words: .*out of memory$"),
    ],
)
def test_one_that_does_not_load_is_named(worker: Path, fault: str, says: str) -> None:
    with pytest.raises(PeerError, match=says):
        started(worker, fault)


def test_an_interpreter_that_is_missing_is_named(worker: Path) -> None:
    with pytest.raises(PeerError, match="it cannot be started"):
        PeerProcess(worker.parent / "python", worker, {}, {})


def test_one_that_never_loads_is_given_up(worker: Path) -> None:
    with pytest.raises(PeerError, match=r"^load: no answer after 0\.3 s"):
        PeerProcess(sys.executable, worker, {"fault": "never loads"}, {}, loading_s=0.3)


@pytest.mark.parametrize(
    ("fault", "ask", "says"),
    [
        ("dies", "decode", "^decode: it has ended with 4"),
        ("lies about tokens", "decode", "^decode: 7 came back, 8 were asked for"),
        ("lies about seconds", "decode", "^seconds: 7 came back, 8 were asked for"),
        ("lies about time", "read", "^it says it took 1000 s, of which each must be above 0, while "),
        ("takes no time", "read", "^it says it took 0 s"),
        ("forgets a token", "batch", "^batch: 7 came back, 8 were asked for"),
        ("forgets a prompt", "batch", "^batch: 1 came back, 2 were asked for"),
    ],
)
def test_one_that_dies_or_lies_is_ended_and_named(worker: Path, fault: str, ask: str, says: str) -> None:
    peer = started(worker, fault)
    questions: dict[str, Callable[[], object]] = {
        "read": lambda: peer.read([1]),
        "decode": lambda: peer.decode(8),
        "batch": lambda: peer.batch([[1], [2]], 8),
    }
    with pytest.raises(PeerError, match=says):
        questions[ask]()
    assert peer._process.poll() is not None
    peer.close()


def test_one_that_is_too_slow_is_ended(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_S", 0.2)
    peer = started(worker, "slow")
    with pytest.raises(
        PeerError, match=r"^read: no answer after 0\.2 s; its last words: loading a library writes here$"
    ):
        peer.read([1])
    assert peer._process.poll() is not None


def test_one_that_does_not_end_is_killed(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_S", 0.2)
    worker.write_text(FAKE + "import atexit; atexit.register(signal.pause)")
    peer = started(worker)
    peer.close()
    assert peer._process.returncode == -9


def test_what_steps_is_timed_step_by_step() -> None:
    steps = iter([[1], [2, 3], [4]])
    found = serve.perform(SimpleNamespace(step=lambda: next(steps)), "decode", {"count": 4})
    assert found["tokens"] == [1, 2, 3, 4]
    assert len(found["seconds"]) == 3
