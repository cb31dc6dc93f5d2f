"""The contract that the demo reads, and how much of it fits. Knows no model: it is handed a count of tokens."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources


def contract_text() -> str:
    """A co-branding agreement of 1999 from CUAD v1 (CC BY 4.0); about 10,000 tokens."""
    return resources.files("ktransformer2").joinpath("data", "contract.txt").read_text(encoding="utf-8")


def longest_fitting(text: str, count: Callable[[str], int], limit: int) -> str:
    """The longest beginning of `text`, ending with a paragraph where one fits, whose `count` is at most `limit`.

    `count` need not be strictly monotone (tokenizers are not), only nearly so. Empty where nothing fits.
    """
    ends = [at for at in range(len(text)) if text.startswith("\n\n", at)] + [len(text)]
    end = _last_fitting(ends, lambda cut: count(text[:cut]) <= limit)
    if end == 0:  # not even one paragraph
        end = _last_fitting(range(1, len(text) + 1), lambda cut: count(text[:cut]) <= limit)
    return text[:end]


def _last_fitting(cuts: list[int] | range, fits: Callable[[int], bool]) -> int:
    low, high = 0, len(cuts)  # everything below `low` fits, nothing from `high` on does
    while low < high:
        middle = (low + high) // 2
        if fits(cuts[middle]):
            low = middle + 1
        else:
            high = middle
    while low and not fits(cuts[low - 1]):  # where `count` was not monotone
        low -= 1
    return cuts[low - 1] if low else 0
