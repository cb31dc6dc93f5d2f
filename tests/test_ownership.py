"""Who came first owns it; a second thread and a child after fork are told so, and change nothing."""

from __future__ import annotations

import os
import threading

import pytest

from ktransformer2.errors import OwnershipError
from ktransformer2.ownership import Owner


def refusal(owner: Owner) -> str:
    """What a second thread is told; empty: nothing."""
    said: list[str] = [""]

    def use() -> None:
        try:
            owner.check()
        except OwnershipError as error:
            said[0] = str(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    return said[0]


def test_a_second_thread_is_told_whose_it_is() -> None:
    owner = Owner("the engine")
    owner.check()
    assert refusal(owner) == (
        f"the engine belongs to thread {threading.get_ident()} of process {os.getpid()} and was used from a second "
        "thread; send the work to that thread, or make another one here"
    )
    owner.check()


def test_whoever_checks_first_takes_possession_until_its_thread_ends() -> None:
    owner, taken, done = Owner("the cache"), threading.Event(), threading.Event()

    def hold() -> None:
        owner.check()
        taken.set()
        done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    with pytest.raises(OwnershipError, match="the cache belongs to thread"):
        owner.check()
    done.set()
    thread.join()
    owner.check()
    assert refusal(owner).startswith("the cache belongs to thread")


def test_a_child_after_fork_has_the_same_thread_id_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner("the cache")
    owner.check()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(OwnershipError, match="was used from a child process after fork"):
        owner.check()


def test_what_is_handed_over_belongs_to_whoever_comes_next() -> None:
    owner = Owner("the cache")
    owner.check()
    owner.hand_over()
    assert refusal(owner) == ""
    owner.check()
    said: list[str] = []

    def steal() -> None:
        try:
            owner.hand_over()
        except OwnershipError as error:
            said.append(str(error))

    thread = threading.Thread(target=steal)
    thread.start()
    thread.join()
    assert said[0].startswith("the cache belongs to thread")
    owner.check()
