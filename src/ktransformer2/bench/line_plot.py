"""Lines as a picture in the terminal, with plotext, which is optional. Knows no scenario."""

from __future__ import annotations

from collections.abc import Sequence


def terminal_plot(title: str, x_label: str, points: Sequence[tuple[str, float, float]], width: int = 90) -> str | None:
    """A line for each name; points are (name, x, y). None where plotext is not installed."""
    try:
        import plotext
    except ImportError:
        return None
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, 20)
    figure.theme("colorless")
    figure.title(title)
    figure.label(x_label, "x")
    for name in dict.fromkeys(name for name, _, _ in points):
        line = [(x, y) for owner, x, y in points if owner == name]
        figure.draw(figure.signal([x for x, _ in line], [y for _, y in line]).lines().label(name))
    text = str(figure.build().string(colorless=True))
    figure.clear()
    return text
