"""Hit rates over capacity as a picture in the terminal, with plotext, which is optional."""

from __future__ import annotations

from collections.abc import Sequence


def terminal_plot(title: str, points: Sequence[tuple[str, float, float]], width: int = 90) -> str | None:
    """A line for each policy; points are (policy, share, hit %). None where plotext is not installed."""
    try:
        import plotext
    except ImportError:
        return None
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, 20)
    figure.theme("colorless")
    figure.title(title)
    figure.label("% of unique blocks", "x")
    for policy in dict.fromkeys(name for name, _, _ in points):
        line = [(100 * share, percent) for name, share, percent in points if name == policy]
        figure.draw(figure.signal([x for x, _ in line], [y for _, y in line]).lines().label(policy))
    text = str(figure.build().string(colorless=True))
    figure.clear()
    return text
