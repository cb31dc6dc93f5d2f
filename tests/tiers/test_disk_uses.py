"""Uses that the index has not been told of: their order, the newest of each key, and no more than so many."""

from __future__ import annotations

from ktransformer2.tiers.disk_uses import PendingUses
from tests.tiers.disk_factories import key_of

A, B, C = (key_of(name) for name in "abc")


def test_the_oldest_comes_first_and_a_chain_from_its_tail() -> None:
    uses = PendingUses()
    uses.note([A, B, C], 1.0)
    uses.note([B], 2.0)
    assert uses
    assert (uses.last_s(B, 0.0), uses.last_s(C, 0.0), uses.last_s(key_of("d"), 0.5)) == (2.0, 1.0, 0.5)
    assert list(uses.take().items()) == [(C, 1.0), (A, 1.0), (B, 2.0)]
    assert not uses
    assert uses.take() == {}


def test_the_oldest_are_forgotten_when_there_are_too_many() -> None:
    uses = PendingUses()
    names = [key_of(f"{i}") for i in range(5000)]
    uses.note(names, 1.0)
    assert list(uses.take()) == names[4095::-1]
