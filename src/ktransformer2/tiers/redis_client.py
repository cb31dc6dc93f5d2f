"""The few commands of a Valkey or Redis server that a tier needs. The one file that imports `redis`; knows no block.

No call raises for what a server or a network does. None says that there is no answer: the server refused, was silent,
hung up, answered what is no answer to the question, or is not asked for a while because it failed before (`breaker`).
Each failure is counted. Its text is not logged: a server may quote what it was sent, a password too.

A cluster is not served: its redirections are failures here.

Invariants: a call is over after `MOST_TIMEOUTS` time-outs, however slowly an answer trickles; after a failure no
connection is used again, so that a late answer is never taken for the next one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ktransformer2.errors import ConfigError
from ktransformer2.tiers.breaker import CircuitBreaker
from ktransformer2.tiers.tally import Tally
from ktransformer2.tiers.valkey_address import ValkeyAddress
from ktransformer2.tiers.watchdog import Watchdog

_T = TypeVar("_T")
MOST_TIMEOUTS = 10  # 8 MB in 5 s by default: what is slower than 1.6 MB/s is a failure
_SCAN_NAMES = 1000  # that the server looks at in one call
_MOST_SCANS = 20_000
_MISSING_MS = -2  # what PTTL says of a name that is not there


class RedisClient:
    """Connects at the first call. Any thread; each call has a connection of its own."""

    def __init__(self, address: ValkeyAddress, breaker: CircuitBreaker, tally: Tally) -> None:
        """Raises: ConfigError without the package redis."""
        self._address, self._breaker, self._tally = address, breaker, tally
        self._redis = _connection_pool(address)
        self._watchdog = Watchdog(MOST_TIMEOUTS * address.timeout_s, self._redis.connection_pool.disconnect)
        self._closed = False

    def look(self, names: Sequence[bytes]) -> tuple[int, dict[bytes, int]] | None:
        """The server's clock, and how long each name that is there has left, both in ms; -1: without end."""
        return self._ask("look", partial(self._look, names))

    def _look(self, names: Sequence[bytes]) -> tuple[int, dict[bytes, int]]:
        pipeline = self._pipeline()
        pipeline.time()
        for name in names:
            pipeline.pttl(name)
        now, *left = pipeline.execute()
        left_ms = dict(zip(names, _all(int, left), strict=True))
        return _milliseconds(now), {name: left for name, left in left_ms.items() if left != _MISSING_MS}

    def store(
        self, renewed: Sequence[bytes], values: Sequence[tuple[bytes, bytes]], expiry_ms: int
    ) -> list[bool] | None:
        """In one pipeline: let names expire then, and set names to values that expire then. Which values are stored."""
        return self._ask("write", partial(self._store, renewed, values, expiry_ms))

    def _store(self, renewed: Sequence[bytes], values: Sequence[tuple[bytes, bytes]], expiry_ms: int) -> list[bool]:
        pipeline = self._pipeline()
        for name in renewed:
            pipeline.pexpireat(name, expiry_ms)
        for name, value in values:
            pipeline.set(name, value, pxat=expiry_ms)
        answers = _all(object, pipeline.execute(raise_on_error=False))[len(renewed) :]
        return [answer is True for _, answer in zip(values, answers, strict=True)]

    def read(self, names: Sequence[bytes]) -> tuple[int, list[bytes | None]] | None:
        """The server's clock in ms, and the values; None for a name that is not there."""
        return self._ask("read", partial(self._read, names))

    def _read(self, names: Sequence[bytes]) -> tuple[int, list[bytes | None]]:
        pipeline = self._pipeline()
        pipeline.time()
        pipeline.mget(names)
        now, values = pipeline.execute()
        found = [value for value in _all(object, values) if value is None or isinstance(value, bytes)]
        return _milliseconds(now), [value for _, value in zip(names, found, strict=True)]

    def starts(self, names: Sequence[bytes], num_bytes: int) -> list[bytes] | None:
        """The first bytes of each value; none of a name that is not there."""
        return self._ask("read", partial(self._starts, names, num_bytes))

    def _starts(self, names: Sequence[bytes], num_bytes: int) -> list[bytes]:
        pipeline = self._pipeline()
        for name in names:
            pipeline.getrange(name, 0, num_bytes - 1)
        return [start for _, start in zip(names, _all(bytes, pipeline.execute()), strict=True)]

    def remove(self, names: Sequence[bytes]) -> tuple[int, int] | None:
        """Delete names, their memory with them: how many values were there, and the bytes of those."""
        return self._ask("delete", partial(self._remove, names))

    def _remove(self, names: Sequence[bytes]) -> tuple[int, int]:
        pipeline = self._pipeline()
        for name in names:
            pipeline.strlen(name)
            pipeline.delete(name)
        answers = _all(int, pipeline.execute())
        return sum(answers[1::2]), sum(answers[::2])

    def scan(self, prefix: bytes) -> Iterator[list[bytes] | None]:
        """The names that begin with `prefix`, page by page, some perhaps twice. Ends with None where it broke off.

        `prefix` has no character that a pattern gives a meaning.
        """
        cursor = 0
        for _ in range(_MOST_SCANS):
            page = self._ask("scan", partial(self._scan, cursor, prefix))
            if page is None:
                yield None
                return
            cursor, names = page
            yield [name for name in names if name.startswith(prefix)]
            if not cursor:
                return
        self._tally.failed("scan", f"{self._address.shown} has no end after {_MOST_SCANS} pages")
        yield None

    def _scan(self, cursor: int, prefix: bytes) -> tuple[int, list[bytes]]:
        after, names = self._redis.scan(cursor, match=prefix + b"*", count=_SCAN_NAMES)
        return _all(int, [after])[0], _all(bytes, names)

    def close(self) -> None:
        """Hang up; calls that wait end now."""
        self._closed = True
        self._watchdog.close()
        self._redis.connection_pool.disconnect()

    def _pipeline(self) -> Any:
        return self._redis.pipeline(transaction=False)

    def _ask(self, what: str, call: Callable[[], _T]) -> _T | None:
        """The answer to a call. None: there is none, or the server is not asked at present."""
        if self._closed or not self._breaker.admit():
            return None
        try:
            with self._watchdog.watching():
                answer = call()
        except Exception as error:  # what answers can make the client raise is no list that could be named here
            if not self._closed:
                self._redis.connection_pool.disconnect(inuse_connections=False)
                self._note_failure(what, error)
            return None
        self._breaker.succeeded()
        return answer

    def _note_failure(self, what: str, error: Exception) -> None:
        self._tally.failed(what, f"{type(error).__name__} from {self._address.shown}")
        if self._breaker.failed():
            self._tally.failed("circuit", f"{self._address.shown} is not asked for a while")


def _connection_pool(address: ValkeyAddress) -> Any:
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError(
            'a shared tier needs the package redis; pip install "ktransformer2[valkey]" brings it'
        ) from error
    return Redis(
        **address.options,
        socket_timeout=address.timeout_s,
        socket_connect_timeout=address.timeout_s,
        retry=Retry(NoBackoff(), 0),  # a failure is a miss; the breaker says when to ask again
        protocol=2,
    )


def _all(kind: type[_T], answers: object) -> list[_T]:
    """A list of answers of one kind. Raises: ValueError for anything else."""
    if not isinstance(answers, list | tuple):
        raise ValueError(f"{type(answers).__name__} instead of a list")
    for answer in answers:
        if not isinstance(answer, kind):
            raise ValueError(f"{type(answer).__name__} instead of {kind.__name__}")
    return list(answers)


def _milliseconds(now: object) -> int:
    """Of what TIME answers: seconds and microseconds."""
    seconds, micros = _all(int, now)
    return seconds * 1000 + micros // 1000
