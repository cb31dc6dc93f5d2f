"""Which blocks a use renews, and to which moment."""

from __future__ import annotations

from ktransformer2.tiers import lifetimes
from ktransformer2.tiers.lifetimes import Lifetimes
from ktransformer2.tiers.tier import ROOT

A, B, C, D = (letter * 33 for letter in (b"a", b"b", b"c", b"d"))


def known_chain() -> Lifetimes:
    lives = Lifetimes(ttl_s=16)
    for key, parent in ((C, B), (A, ROOT), (B, A)):
        lives.learn(key, parent, holds_parent=True)
    return lives


def test_an_expiry_is_the_time_to_live_rounded_up_to_a_sixteenth() -> None:
    lives = Lifetimes(ttl_s=16)
    assert [lives.expiry_ms(now) for now in (0, 1, 999, 1000, 1001)] == [16000, 17000, 17000, 17000, 18000]
    assert Lifetimes(ttl_s=0.004).expiry_ms(7) == 11


def test_a_use_renews_the_way_to_the_root_once_in_a_sixteenth() -> None:
    lives = known_chain()
    assert lives.due([C], 17000) == [A, B, C]
    assert lives.due([A, B, C], 17000) == [A, B, C]
    lives.renewed([A, B], 17000)
    assert lives.due([C], 17000) == [C]
    lives.renewed([C], 17000)
    assert lives.due([C, B], 17000) == []
    assert lives.due([C], 18000) == [A, B, C]


def test_the_first_unknown_parent_is_named() -> None:
    lives = Lifetimes(ttl_s=16)
    assert (lives.unknown(ROOT), lives.unknown(C)) == (ROOT, C)
    lives.learn(C, B, holds_parent=True)
    assert lives.unknown(C) == B
    lives.learn(B, A, holds_parent=False)  # a window ends the way
    assert lives.unknown(C) == ROOT
    assert lives.due([C], 17000) == [B, C]


def test_what_is_remembered_is_bounded() -> None:
    lives = known_chain()
    lives._parents |= {bytes([1]) * 30 + number.to_bytes(3, "big"): A for number in range(lifetimes._MOST_KNOWN)}
    lives.learn(D, C, holds_parent=True)
    assert lives._parents == {D: C}
    assert lives.unknown(D) == C


def test_a_server_whose_word_goes_round_in_a_circle_hangs_nobody() -> None:
    lives = known_chain()
    lives.learn(A, C, holds_parent=True)
    assert lives.due([C], 17000), "it ends"
    assert lives.unknown(C) in (A, B, C)
    assert lives.unknown(B) == B, "what was told is forgotten"
    lives.learn(D, D, holds_parent=True)
    assert lives.unknown(D) == D
