"""Time a token and time to the first one over the length of the prompt, one line a contender. Knows rows only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ktransformer2.bench.line_plot import terminal_plot
from ktransformer2.bench.peers.contenders import OURS

COLUMNS = {"ms_per_token": "ms a token", "first_s": "s to the first token"}
Rows = Sequence[Mapping[str, object]]


def lines(rows: Rows, column: str) -> dict[str, list[tuple[float, float]]]:
    """Points (tokens of the prompt, value) of every contender that was measured at two lengths or more."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        length, value = row.get("prompt_tokens"), row.get(column)
        if isinstance(length, int) and isinstance(value, float):
            found.setdefault(str(row["contender"]), []).append((length, value))
    return {name: sorted(points) for name, points in found.items() if len(points) > 1}


def in_terminal(rows: Rows) -> str | None:
    """The first column's plot as text; None without two lengths, or where plotext is not installed."""
    column, label = next(iter(COLUMNS.items()))
    points = [(name, x, y) for name, line in lines(rows, column).items() for x, y in line]
    return terminal_plot(f"{label}, by tokens of the prompt", "tokens", points) if points else None


def draw(rows: Rows, path: Path) -> bool:
    """Both columns as a PNG; False where there is nothing to draw or matplotlib is not installed."""
    if not lines(rows, "ms_per_token"):
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(13, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (column, label) in zip(figure.subplots(1, len(COLUMNS)), COLUMNS.items(), strict=True):
        for name, points in lines(rows, column).items():
            width = 2.5 if name.startswith(OURS) else 1.2
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=width, label=name)
        axes.set(xlabel="tokens of the prompt", ylabel=label, yscale="log")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path)
    return True
