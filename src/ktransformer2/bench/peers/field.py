"""The contenders that run: started one after another, asked in turns, named where they fail. Measures nothing itself.

Invariant: exactly one of them computes at a time, since every question is answered before the next one is put.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ktransformer2.bench.outcome import say
from ktransformer2.bench.peers.contenders import OURS, Contender
from ktransformer2.bench.peers.environments import python_of
from ktransformer2.bench.peers.process import PeerError, PeerProcess

WORKERS = Path(__file__).parent / "workers"
T = TypeVar("T")


class Field:
    """Contenders by name, those that run and those that failed. Used as a context, which ends their processes."""

    def __init__(self, model_of: Callable[[str], Path], threads: int, seed: int) -> None:
        """`model_of`: the model in a form that a contender names. `threads`: what every contender computes with."""
        self._model_of, self._threads = model_of, threads
        self._rng = random.Random(seed)
        self._running: dict[str, tuple[Contender, PeerProcess]] = {}
        self.failures: dict[str, str] = {}
        self.abouts: dict[str, dict[str, Any]] = {}

    def start(self, contenders: Iterable[Contender]) -> None:
        """Start and load each of them; one that fails is named and left out."""
        for contender in contenders:
            say(f"starting {contender.name}")
            try:
                process = self._process(contender)
            except PeerError as error:
                self._name(contender, error)
                continue
            self._running[contender.name] = (contender, process)
            self.abouts[contender.name] = process.about

    def running(self, part: str) -> list[Contender]:
        """Those that take part in this part of the scenario and have not failed."""
        return [contender for contender, _ in self._running.values() if part in contender.parts]

    def turn(self, contenders: Sequence[Contender], ask: Callable[[PeerProcess], T]) -> dict[str, T]:
        """Ask each of them that still runs, in an order that is drawn anew. One that fails is out from then on."""
        order = [contender for contender in contenders if contender.name in self._running]
        self._rng.shuffle(order)
        answers: dict[str, T] = {}
        for contender in order:
            process = self._running[contender.name][1]
            try:
                answers[contender.name] = ask(process)
            except PeerError as error:
                self._name(contender, error)
                del self._running[contender.name]
                process.close()
        return answers

    def peak_bytes(self, name: str) -> int:
        """The most that was ever resident in this contender's process, loading included."""
        return self._running[name][1].peak_bytes

    def close(self) -> None:
        for _, process in self._running.values():
            process.close()
        self._running.clear()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _process(self, contender: Contender) -> PeerProcess:
        """Raises: PeerError."""
        python = sys.executable if contender.peer == OURS else python_of(contender.peer)
        options = {"model": str(self._model_of(contender.model)), "threads": self._threads, **contender.options}
        variables = environment_of(contender, os.environ, self._threads)
        return PeerProcess(python, WORKERS / contender.worker, options, variables)

    def _name(self, contender: Contender, error: PeerError) -> None:
        say(f"{contender.name}: {error}")
        self.failures[contender.name] = str(error)


def environment_of(contender: Contender, before: Mapping[str, str], threads: int) -> dict[str, str]:
    """Variables of its process: no network, its share of threads, and for ours the path where the package lies."""
    variables = dict(before) | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    return variables | ({"PYTHONPATH": os.pathsep.join(sys.path)} if contender.peer == OURS else {})
