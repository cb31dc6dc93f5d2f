"""The memory curve, its table, its plots, and the line to compare with."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from ktransformer2.demo.memory_curve import MemoryCurve, static_cache_bytes
from ktransformer2.demo.plots import png_plot, terminal_plot
from ktransformer2.demo.report import memory_table
from ktransformer2.layout import Form, LayerGroup, ModelGeometry


def curve_of(held: list[int], static: int = 200_000_000) -> MemoryCurve:
    """A curve whose samples lie a second apart; the first, the highest and the last have names."""
    figures = (SimpleNamespace(held_bytes=value + 1000, used_bytes=value // 2) for value in held)
    ticks = itertools.count()
    curve = MemoryCurve(lambda: next(figures), static, clock=lambda: float(next(ticks)))  # type: ignore[arg-type,return-value]  # has the fields that are read
    names = {0: "start", held.index(max(held)): "contract read", len(held) - 1: "clear()"}
    for place in range(len(held)):
        curve.sample(place * 100, names.get(place, ""))
    return curve


def test_static_cache_of_smollm2_at_8k() -> None:
    group = LayerGroup(tuple(range(30)), num_kv_heads=3, k_head_size=64, v_head_size=64)
    geometry = ModelGeometry((group,), Form.FP32, 8192, (None,))
    assert static_cache_bytes(geometry, 8192) == 8192 * 23_040


def test_samples_count_tables_and_keep_their_moments() -> None:
    curve = curve_of([0, 10_000_000, 30_000_000, 0])
    assert [sample.held_bytes for sample in curve.samples] == [1000, 10_001_000, 30_001_000, 1000]
    assert [sample.seconds for sample in curve.samples] == [1.0, 2.0, 3.0, 4.0]
    assert [sample.moment for sample in curve.moments] == ["start", "contract read", "clear()"]
    assert curve.peak_bytes == 30_001_000


def test_table_shows_the_moments_beside_a_static_cache() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the console
    with console.file:
        console.print(memory_table(curve_of([0, 10_000_000, 30_000_000, 0])))
        text = console.export_text()
    row = next(line for line in text.splitlines() if "contract read" in line)
    assert row.split("│")[1:-1] == [
        " contract read ",
        "    200 ",
        "         30 MB ",
        "  15 MB ",
        " 200 MB ",
        " 15.0 % ",
    ]


def test_terminal_plot_has_both_curves_and_no_escape_codes() -> None:
    text = terminal_plot(curve_of([0, 10_000_000, 30_000_000, 0]), width=80, height=18)
    assert text is not None
    assert "static cache" in text
    assert "KTransformer2" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_png_plot(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert png_plot(curve_of([0, 10_000_000, 30_000_000, 0]), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("package", "plot"), [("plotext", terminal_plot), ("matplotlib.figure", png_plot)])
def test_without_the_plot_packages_there_is_no_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, plot: object
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    curve = curve_of([0, 1])
    if plot is terminal_plot:
        assert terminal_plot(curve) is None
    else:
        assert png_plot(curve, tmp_path / "plot.png") is False
