"""What the tests of tiers share: disk tiers that are closed at the end, and a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ktransformer2.bench.valkey_server import free_port
from ktransformer2.tiers.disk import DiskTier
from tests.tiers.disk_factories import Opener
from tests.tiers.valkey_server import direct, running_server


@pytest.fixture
def open_tier() -> Iterator[Opener]:
    """Opens disk tiers like `DiskTier` itself."""
    opened: list[DiskTier] = []

    def open_(*arguments: object, **more: object) -> DiskTier:
        opened.append(DiskTier(*arguments, **more))  # type: ignore[arg-type]  # as the caller gives them
        return opened[-1]

    yield open_
    for tier in opened:
        tier.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that one file of tests has to itself."""
    port = free_port()
    with running_server(tmp_path_factory.mktemp("valkey"), port):
        yield port


@pytest.fixture
def port(server: int) -> int:
    """Of a server that holds nothing."""
    direct(server).flushall()
    return server
