"""What is denied, what is never denied, and what was denied in vain."""

from __future__ import annotations

from ktransformer2.tiers.shared_filter import MOST_DENIED, SharedFilter
from tests.tiers.disk_factories import key_of

A, B, C, D = (key_of(name) for name in "abcd")


def scanned(found: set[bytes]) -> SharedFilter:
    shared = SharedFilter()
    shared.begin_scan()
    assert shared.end_scan(found) == 0
    return shared


def test_before_the_first_scan_nothing_is_denied() -> None:
    shared = SharedFilter()
    assert shared.may_hold(A)
    assert (shared.passes(A), shared.is_worn) == (False, False)
    shared.begin_scan()
    assert shared.end_scan(None) == 0  # broken off
    assert shared.may_hold(A)


def test_what_was_found_or_touched_is_never_denied() -> None:
    shared = scanned({A})
    assert [shared.may_hold(key) for key in (A, B)] == [True, False]
    shared.add([B])
    assert shared.may_hold(B)
    shared.begin_scan()
    shared.add([C])  # the scan has passed it by
    assert shared.may_hold(C)
    shared.end_scan({A})
    assert [shared.may_hold(key) for key in (A, B, C)] == [True, False, True]  # the server has lost B
    shared.begin_scan()
    shared.end_scan({A})
    assert not shared.may_hold(C)


def test_what_was_denied_and_is_found_later_was_missed() -> None:
    shared = scanned({A})
    assert not any([shared.may_hold(B), shared.may_hold(B), shared.may_hold(C), shared.may_hold(D)])
    shared.add([D])  # written by this process after it had asked: not missed
    shared.begin_scan()
    assert shared.end_scan({A, B, D}) == 1
    shared.begin_scan()
    assert shared.end_scan({A, B, C, D}) == 0  # C was denied before the scan before: asked and told


def test_the_keys_that_were_denied_are_bounded() -> None:
    shared = scanned(set())
    keys = [key_of(str(number)) for number in range(MOST_DENIED + 10)]
    assert not any(shared.may_hold(key) for key in keys)
    shared.begin_scan()
    assert shared.end_scan(set(keys)) == MOST_DENIED


def wears(shared: SharedFilter, number: int) -> bool:
    """Whether it is worn once it is told of one key more."""
    shared.add([key_of(f"gone {number}")])
    return shared.is_worn


def test_what_is_gone_wears_it_until_the_next_scan() -> None:
    shared = scanned({A})
    num_told = next(number for number in range(5000) if wears(shared, number))
    assert 1000 < num_told < 1500  # a filter for 1,024 keys at least, and a fifth
    shared.begin_scan()
    shared.end_scan({A})
    assert not wears(shared, 0)
    assert shared.may_hold(A)
    assert sum(shared.may_hold(key_of(f"gone {i}")) for i in range(num_told)) <= 12
