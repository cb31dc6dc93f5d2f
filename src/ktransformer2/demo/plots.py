"""The memory curve as a picture: in the terminal with plotext, as a PNG with matplotlib. Both are optional packages."""

from __future__ import annotations

from pathlib import Path

from ktransformer2.demo.memory_curve import MemoryCurve

_TITLE = "KV cache while a contract is read, asked twice, and forgotten"


def _series(curve: MemoryCurve) -> tuple[list[float], list[float], list[float]]:
    """(seconds, held MB, static MB), held as steps: memory changes at a sample, not between two."""
    seconds: list[float] = []
    held: list[float] = []
    for sample in curve.samples:
        if held:
            seconds.append(sample.seconds)
            held.append(held[-1])
        seconds.append(sample.seconds)
        held.append(sample.held_bytes / 1e6)
    return seconds, held, [curve.static_bytes / 1e6] * len(seconds)


def terminal_plot(curve: MemoryCurve, width: int = 80, height: int = 18) -> str | None:
    """The plot as text; None where plotext is not installed."""
    try:
        import plotext
    except ImportError:
        return None
    seconds, held, static = _series(curve)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.theme("colorless")  # the coloured themes paint their own background over the terminal's
    figure.title(_TITLE)
    figure.label("seconds", "x")
    figure.label("MB", "y")
    figure.draw(figure.signal(seconds, static).lines().label("static cache, 16 bit"))
    figure.draw(figure.signal(seconds, held).lines().label("KTransformer2"))
    text = str(figure.build().string(colorless=True))
    figure.clear()
    return text


def png_plot(curve: MemoryCurve, path: Path) -> bool:
    """Write the plot to `path`; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    seconds, held, static = _series(curve)
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(seconds, static, color="tab:gray", linestyle="--", label="static cache, model's full length, 16 bit")
    axes.plot(seconds, held, color="tab:blue", label="KTransformer2: committed, tables included")
    axes.fill_between(seconds, held, color="tab:blue", alpha=0.15)
    moments = curve.moments
    axes.plot([m.seconds for m in moments], [m.held_bytes / 1e6 for m in moments], "o", color="tab:blue", markersize=4)
    for number, moment in enumerate(moments):
        axes.annotate(
            moment.moment,
            (moment.seconds, moment.held_bytes / 1e6),
            xytext=(-4, 6 + 11 * (number % 2)),
            textcoords="offset points",
            horizontalalignment="left" if moment is moments[0] else "right",
            fontsize=8,
        )
    axes.set(title=_TITLE, xlabel="seconds", ylabel="MB", ylim=(0, 1.15 * max(static[:1] + held)))
    axes.legend(loc="center left", fontsize=8)
    figure.savefig(path)
    return True
