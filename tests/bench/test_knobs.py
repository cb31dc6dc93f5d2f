"""What chose the defaults: how values are judged against them, and that a knob that is moved moves its figures."""

from __future__ import annotations

from typing import Any

import pytest

from ktransformer2.bench import knobs
from ktransformer2.bench.knobs import GRID, REUSE, Trial, judged
from ktransformer2.config import CacheConfig


def trials(**figures: tuple[float, float]) -> list[Trial]:
    """The default of `growth_factor`, 1.5, and one other value: the two figures of each name."""
    return [
        Trial("growth_factor", value, {name: pair[i] for name, pair in figures.items()})
        for i, value in enumerate((1.5, 2.0))
    ]


@pytest.mark.parametrize(
    ("figures", "default_says", "other_says"),
    [
        ({"waste": (0.10, 0.10)}, "DEFAULT: this does not tell the values apart", "alike"),
        ({"waste": (0.10, 0.1009)}, "DEFAULT: this does not tell the values apart", "alike"),
        ({"waste": (0.10, 0.09), "calls": (1.0, 1.0)}, "DEFAULT: beaten by 2", "waste -10%"),
        ({"waste": (0.10, 0.096)}, "DEFAULT: none beats it", "waste -4%"),
        ({"waste": (0.10, 0.09), "calls": (1.0, 1.5)}, "DEFAULT: none beats it", "waste -10%, calls +50%"),
        ({"waste": (0.0, 0.0004)}, "DEFAULT: none beats it", "waste +4%"),  # of 0.01, not of nothing
    ],
)
def test_values_are_judged_against_the_default(
    figures: dict[str, tuple[float, float]], default_says: str, other_says: str
) -> None:
    rows = judged("some part", trials(**figures))
    assert [row["against_default"] for row in rows] == [default_says, other_says]
    assert rows[0] == {"part": "some part", "knob": "growth_factor", "value": 1.5} | {
        name: pair[0] for name, pair in figures.items()
    } | {"against_default": default_says}


def test_every_grid_holds_its_default_amid_other_values() -> None:
    for name, values in {**GRID, **REUSE}.items():
        assert getattr(CacheConfig(), name) in values[1:-1], name
        assert list(values) == sorted(set(values)), name
        for value in values:
            CacheConfig.load({name: value})


def test_what_is_replayed_shows_what_a_knob_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "_TRACES", {"azure_2023_conv": (6, 6)})
    monkeypatch.setattr(knobs, "GRID", {"block_tokens": (32, 64, 128), "min_chunk_tokens": (64, 256, 1024)})
    rows: dict[Any, Any] = {(row["knob"], row["value"]): row for row in knobs.rows(quick=False)}
    assert len(rows) == 3 + 3 + len(REUSE["cached_share_ratio"])
    waste = [rows["block_tokens", size]["waste_tokens"] for size in (32, 64, 128)]
    assert waste == sorted(waste)
    growths = [rows["min_chunk_tokens", size]["growth_per_1k"] for size in (64, 256, 1024)]
    assert growths == sorted(growths, reverse=True)
    missed = [rows["cached_share_ratio", share]["missed"] for share in REUSE["cached_share_ratio"]]
    assert missed == sorted(missed, reverse=True)
    assert rows["block_tokens", 64]["against_default"].startswith("DEFAULT: ")
