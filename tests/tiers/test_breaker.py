"""Who may ask a server that fails, with a clock that is set by hand."""

from __future__ import annotations

from ktransformer2.tiers.breaker import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_failures_in_a_row_open_it_and_an_answer_starts_the_count_again() -> None:
    breaker = CircuitBreaker(Clock(), max_failures=3)
    assert [breaker.failed(), breaker.failed()] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(), breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True, False]
    assert breaker.is_open
    assert not breaker.admit()


def test_after_a_pause_one_may_ask_and_its_failure_begins_the_next() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock, max_failures=1, pause_s=5.0)
    assert breaker.failed()
    clock.now += 4
    assert not breaker.admit()
    clock.now += 1
    assert not breaker.is_open
    assert [breaker.admit(), breaker.admit()] == [True, False]  # the second one waits for the first one's answer
    clock.now += 3
    assert not breaker.failed()
    clock.now += 4
    assert not breaker.admit()  # counted from the failure
    clock.now += 1
    assert breaker.admit()
    breaker.succeeded()
    assert [breaker.is_open, breaker.admit(), breaker.admit()] == [False, True, True]


def test_a_clock_that_jumps_back_ends_the_pause() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock, max_failures=1, pause_s=5.0)
    breaker.failed()
    clock.now -= 50
    assert breaker.admit()
