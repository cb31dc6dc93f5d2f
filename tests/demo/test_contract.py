"""How much of a text fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ktransformer2.demo.contract import contract_text, longest_fitting

texts = st.lists(st.text("ab ", min_size=1, max_size=9), max_size=8).map("\n\n".join)


def test_the_contract_is_the_one_it_says() -> None:
    text = contract_text()
    assert "CO-BRANDING Agreement" in text
    assert len(text) == 47_952


@given(texts, st.integers(0, 80))
def test_what_is_taken_fits_and_one_paragraph_more_does_not(text: str, limit: int) -> None:
    taken = longest_fitting(text, len, limit)
    assert text.startswith(taken)
    assert len(taken) <= limit
    if taken != text:
        rest = text[len(taken) :]
        end = rest.find("\n\n", 1)
        more = taken + (rest if end < 0 else rest[:end])
        assert len(more) > limit


def test_a_long_first_paragraph_is_cut_inside() -> None:
    assert longest_fitting("abcdef\n\ngh", len, 4) == "abcd"


def test_nothing_fits() -> None:
    assert longest_fitting("abc", lambda part: 10 + len(part), 10) == ""


def test_a_count_that_is_not_monotone_is_still_kept() -> None:
    # as tokenizers do: one character more can merge two tokens into one
    counts = {0: 0, 1: 1, 2: 2, 3: 2, 4: 9, 5: 3, 6: 4}
    taken = longest_fitting("abcdef", lambda part: counts[len(part)], 3)
    assert counts[len(taken)] <= 3
