"""What is watched too long is ended, and again if it goes on; what ends in time is not. Threads are waited for."""

from __future__ import annotations

import threading

from ktransformer2.tiers.watchdog import Watchdog

LONG_S = 30.0


def test_what_takes_too_long_is_ended_and_again_while_it_goes_on() -> None:
    acted = threading.Semaphore(0)
    watchdog = Watchdog(0.01, lambda: acted.release())
    with watchdog.watching():
        assert acted.acquire(timeout=LONG_S)
        assert acted.acquire(timeout=LONG_S), "it had nothing to end, or came too early"
    with watchdog.watching():
        assert acted.acquire(timeout=LONG_S), "it watches the next one too"
    watchdog.close()


def test_each_of_several_is_watched_by_itself() -> None:
    acted = threading.Semaphore(0)
    watchdog = Watchdog(0.01, lambda: acted.release())
    with watchdog.watching(), watchdog.watching():
        assert len(watchdog._deadlines) == 2
        assert acted.acquire(timeout=LONG_S)
        assert acted.acquire(timeout=LONG_S)
    watchdog.close()


def test_what_ends_in_time_is_left_alone() -> None:
    acted = threading.Event()
    watchdog = Watchdog(LONG_S, acted.set)
    for _ in range(3):
        with watchdog.watching():
            pass
    assert not watchdog._deadlines
    watchdog.close()
    watchdog.close()
    assert not acted.is_set()


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    watchdog = Watchdog(LONG_S, lambda: None)
    (thread,) = set(threading.enumerate()) - before
    watchdog.close()
    thread.join(LONG_S)
    assert not thread.is_alive()
