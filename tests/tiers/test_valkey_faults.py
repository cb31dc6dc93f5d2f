"""A server that hangs, refuses, hangs up, trickles and answers wrongly: misses and counters, never an error, soon over.

The server is a real one; a proxy in front of it does what is wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ktransformer2.bench.valkey_server import free_port
from ktransformer2.tiers.valkey import ValkeyTier
from tests.tiers.disk_factories import PAYLOAD_BYTES, block, chain, key_of
from tests.tiers.fault_proxy import HANG, PASS, REFUSE, Fault, FaultProxy, cut, garble, say, trickle
from tests.tiers.valkey_server import Clock, tier

BLOCKS = chain("a", 3)
KEYS = [one.key for one in BLOCKS]
PAYLOADS = [one.payload for one in BLOCKS]
SHORT_S = 0.05
PAUSE_S = 5.0


@pytest.fixture
def proxy(port: int) -> Iterator[FaultProxy]:
    with FaultProxy(port) as between:
        yield between


def ask_everything(one: ValkeyTier) -> list[object]:
    """What each call says, with failures that do not add up: each call is asked as if the server had just been well."""
    calls: list[Callable[[], Any]] = [
        lambda: one.put(BLOCKS),
        lambda: one.get(KEYS),
        one.refresh,
        one.clear,
    ]
    said = []
    for call in calls:
        one._breaker.succeeded()
        said.append(call())
    return said


NOTHING = [0, [], False, 0]


def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), tier(free_port()) as one:
        assert ask_everything(one) == NOTHING
        assert one.stats().failures == {"look": 1, "read": 1, "scan": 2}
    assert len(caplog.messages) == 3  # a line for each kind


@pytest.mark.parametrize(
    "fault", [HANG, REFUSE, cut(0), cut(7), trickle(SHORT_S / 2)], ids=["hang", "refuse", "cut 0", "cut 7", "trickle"]
)
def test_a_server_that_does_not_answer_is_soon_given_up(proxy: FaultProxy, fault: Fault) -> None:
    proxy.fault = fault
    with tier(proxy.port, timeout_s=SHORT_S) as one:
        began = time.monotonic()
        assert ask_everything(one) == NOTHING
        assert time.monotonic() - began < 4 * 2 * 10 * SHORT_S
        assert sum(one.stats().failures.values()) >= 4


def test_after_three_failures_nobody_asks_until_the_pause_is_over(proxy: FaultProxy) -> None:
    clock = Clock()
    proxy.fault = REFUSE
    with tier(proxy.port, clock=clock) as one:
        for _ in range(3):
            assert one.may_hold(KEYS[0])  # nothing is known, so it is worth asking
            assert one.get(KEYS) == []
        asked = proxy.connections
        for _ in range(50):
            assert not one.may_hold(KEYS[0])
            assert one.get(KEYS) == []
            assert one.put(BLOCKS) == 0
        assert proxy.connections == asked
        assert one.stats().failures == {"read": 3, "circuit": 1}
        clock.now += PAUSE_S
        assert one.may_hold(KEYS[0])
        assert one.get(KEYS) == []  # the one that tries
        assert one.put(BLOCKS) == 0
        assert not one.may_hold(KEYS[0])
        assert proxy.connections == asked + 1
        proxy.fault = PASS
        clock.now += PAUSE_S
        assert one.put(BLOCKS) == 3
        assert one.get(KEYS) == PAYLOADS


def test_an_answer_that_breaks_off_loses_nothing_that_was_written(proxy: FaultProxy) -> None:
    with tier(proxy.port) as one:
        one.refresh()
        fault_after_the_first: list[Fault] = [PASS, cut(3)]
        proxy.fault = lambda answer: fault_after_the_first.pop(0)(answer) if fault_after_the_first else PASS(answer)
        assert one.put(BLOCKS) == 0  # the server has them, or the first of them, and nobody has heard of it
        assert one.stats().failures == {"write": 1}
        proxy.fault = PASS
        assert all(one.may_hold(key) for key in KEYS)
        held = one.get(KEYS)
        assert held == PAYLOADS[: len(held)]
        assert one.put(BLOCKS) == 3
        assert one.get(KEYS) == PAYLOADS


@pytest.mark.parametrize("num_bytes", [100, PAYLOAD_BYTES, 2 * PAYLOAD_BYTES])
def test_a_chain_that_breaks_off_is_a_miss(proxy: FaultProxy, num_bytes: int) -> None:
    with tier(proxy.port) as one:
        assert one.put(BLOCKS) == 3
        proxy.fault = cut(num_bytes)
        assert one.get(KEYS) == []
        proxy.fault = PASS
        assert one.get(KEYS) == PAYLOADS  # on a connection of its own, not with the rest of the answer before


WRONG = [
    b"+OK\r\n",
    b"$-1\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b":1\r\n",
    b"-ERR no\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"-OOM command not allowed\r\n",
    b"-LOADING wait\r\n",
    b"*2\r\n$-1\r\n$-1\r\n",
    b"*2\r\n:1\r\n:2\r\n",
    b"*2\r\n*2\r\n:1\r\n:2\r\n*1\r\n$1\r\nx\r\n",
    b"$5\r\nhello\r\n",
    b"$99999999999\r\n",
    b"*99999999\r\n",
    b"$x\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\r\n",
    b"\xff\xfe",
    b"+OK\r\n" * 50,
    b":7\r\n" * 50,
    b"*2\r\n$1\r\n0\r\n*0\r\n" * 50,
]


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: repr(answer[:24]))
def test_wrong_answers_are_no_answers(proxy: FaultProxy, answer: bytes) -> None:
    proxy.fault = say(answer)
    with tier(proxy.port, timeout_s=SHORT_S) as one:
        assert ask_everything(one)[:2] == NOTHING[:2]


@pytest.mark.parametrize("seed", range(12))
def test_answers_with_turned_bits_bring_no_wrong_byte(proxy: FaultProxy, seed: int) -> None:
    clock = Clock()
    with tier(proxy.port, timeout_s=10 * SHORT_S, clock=clock) as one:
        assert one.put(BLOCKS) == 3
        proxy.fault = garble(seed)
        for _ in range(2):
            clock.now += PAUSE_S
            got = one.get(KEYS)
            assert got == PAYLOADS[: len(got)]
            one.put([*BLOCKS, block("b")])
        proxy.fault = PASS
        clock.now += PAUSE_S
        assert one.put(BLOCKS) == 3  # what was taken for broken has come back
        assert one.get(KEYS) == PAYLOADS


def test_a_look_that_breaks_off_leaves_the_filter_as_it_was(proxy: FaultProxy) -> None:
    with tier(proxy.port) as one:
        one.put(BLOCKS)
        assert one.refresh()
        proxy.fault = cut(2)
        assert not one.refresh()
        assert [one.may_hold(key) for key in (KEYS[0], key_of("never"))] == [True, False]
        assert one.stats().failures == {"scan": 1}


def test_a_python_that_has_begun_to_end_starts_no_thread_and_still_writes(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with tier(port) as one:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert one.put(BLOCKS) == 3
        assert one.get(KEYS) == PAYLOADS
        assert one.stats().failures == {}


def test_closing_does_not_wait_for_a_server_that_hangs(proxy: FaultProxy) -> None:
    asked = threading.Event()

    def hang(_: bytes) -> list[bytes]:
        asked.set()
        return []

    proxy.fault = hang
    with tier(proxy.port, timeout_s=30.0) as one:
        asking = threading.Thread(target=one.get, args=(KEYS,))
        asking.start()
        assert asked.wait(5)
        began = time.monotonic()
        one.close()
        asking.join(5)
        assert not asking.is_alive()
        assert time.monotonic() - began < 5
        assert one.stats().failures == {}
