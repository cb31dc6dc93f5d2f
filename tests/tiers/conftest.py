"""What the tests of the disk tier share: opening tiers that are closed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ktransformer2.tiers.disk import DiskTier
from tests.tiers.disk_factories import Opener


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
