"""Questions of other threads to the owner of a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.questions import MOST_WAITING
from ktransformer2.errors import EngineClosedError, QueueFullError
from tests.cache.factories import make_cache


def test_the_owner_answers_one_question_a_maintain_in_order() -> None:
    cache = make_cache()
    answers: list[Future[int]] = []

    def add(number: int) -> Callable[[KVCache], int]:
        return lambda cache: cache.config.block_tokens + number

    asker = threading.Thread(target=lambda: answers.extend(cache.ask(add(number)) for number in range(3)))
    asker.start()
    asker.join()
    for answered in range(4):
        assert [answer.done() for answer in answers] == [number < answered for number in range(3)]
        cache.maintain()
    assert [answer.result(0) for answer in answers] == [16, 17, 18]


def test_a_question_that_fails_fails_where_it_was_asked() -> None:
    cache = make_cache()
    answer = cache.ask(lambda cache: 1 // 0)
    cache.maintain()
    with pytest.raises(ZeroDivisionError):
        answer.result(0)


def test_a_question_that_was_withdrawn_is_not_asked() -> None:
    cache = make_cache()
    asked: list[object] = []
    assert cache.ask(asked.append).cancel()
    cache.maintain()
    assert asked == []


def test_too_many_questions_are_refused() -> None:
    cache = make_cache()
    for _ in range(MOST_WAITING):
        cache.ask(lambda cache: None)
    with pytest.raises(QueueFullError, match=f"{MOST_WAITING} questions wait"):
        cache.ask(lambda cache: None)
    cache.maintain()
    cache.ask(lambda cache: None)


def test_nobody_waits_for_a_cache_that_is_closed() -> None:
    cache = make_cache()
    waiting, withdrawn = cache.ask(lambda cache: None), cache.ask(lambda cache: None)
    withdrawn.cancel()
    cache.close()
    with pytest.raises(EngineClosedError, match="before it answered"):
        waiting.result(0)
    with pytest.raises(EngineClosedError, match="nobody is left"):
        cache.ask(lambda cache: None)
