"""What the demo found, as a table, as sentences, and as JSON. Measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ktransformer2.config import format_bytes
from ktransformer2.console import format_seconds
from ktransformer2.demo.memory_curve import MemoryCurve
from ktransformer2.demo.plots import png_plot, terminal_plot
from ktransformer2.demo.scenario import LAST_QUESTION, QUESTIONS, DemoResult
from ktransformer2.engine.outputs import Usage
from ktransformer2.errors import ConfigError


def memory_table(curve: MemoryCurve) -> Table:
    """Memory at the named moments, next to what a static cache would have held all along."""
    table = Table(title="Memory of the cache")
    for heading in ("moment", "tokens", "KTransformer2", "in use", "static", "share"):
        table.add_column(heading, justify="left" if heading == "moment" else "right")
    for sample in curve.moments:
        table.add_row(
            sample.moment,
            f"{sample.tokens:,}" if sample.tokens else "",
            format_bytes(sample.held_bytes),
            format_bytes(sample.used_bytes),
            format_bytes(curve.static_bytes),
            f"{100 * sample.held_bytes / curve.static_bytes:.1f} %",
        )
    return table


def sentences(result: DemoResult) -> list[str]:
    """Reuse, time to the first token, and memory, each in one line; first what an earlier run had kept."""
    cold, warm = (output.usage for output in result.outputs)
    lines = [f"Reuse: {warm.cached_tokens:,} of the second question's {warm.prompt_tokens:,} tokens were in the cache."]
    if cold.num_restored:
        found = f"restored {cold.num_restored:,}, reused {cold.cached_tokens:,} of the first question's tokens"
        lines.insert(0, f"Earlier run: {found}, which it had kept; --no-persist starts anew.")
    if cold.ttft_s and warm.ttft_s and cold.num_restored:
        lines.append(
            f"First token: {format_seconds(cold.ttft_s)} with what was kept, {format_seconds(warm.ttft_s)} warm."
        )
    elif cold.ttft_s and warm.ttft_s:
        lines.append(
            f"First token: {format_seconds(cold.ttft_s)} cold, {format_seconds(warm.ttft_s)} warm "
            f"({cold.ttft_s / warm.ttft_s:.0f} times sooner)."
        )
    if result.restarted is not None:
        last = result.restarted.usage
        found = f"restored {last.num_restored:,}, reused {last.cached_tokens:,} of the last question's"
        first = "" if last.ttft_s is None else f"; first token {format_seconds(last.ttft_s)}"
        lines.append(f"Restart: a new process {found} {last.prompt_tokens:,} tokens{first}.")
    peak, static = result.curve.peak_bytes, result.curve.static_bytes
    share = f"{100 * peak / static:.0f} % of a static cache's {format_bytes(static)}"
    freed = format_bytes(result.freed_bytes)
    lines.append(f"Memory: at most {format_bytes(peak)}, {share}; clear() gave {freed} back.")
    return lines


def as_json(result: DemoResult) -> dict[str, Any]:
    """The same, for programs."""
    last = result.restarted
    return {
        "contract_characters": result.contract_characters,
        "answers": [
            _answer_json(question, output.text, output.usage)
            for question, output in zip(QUESTIONS, result.outputs, strict=True)
        ],
        "after_restart": None if last is None else _answer_json(LAST_QUESTION, last.text, last.usage),
        "static_bytes": result.curve.static_bytes,
        "peak_bytes": result.curve.peak_bytes,
        "freed_bytes": result.freed_bytes,
        "samples": [
            {
                "seconds": round(sample.seconds, 4),
                "tokens": sample.tokens,
                "held_bytes": sample.held_bytes,
                "used_bytes": sample.used_bytes,
                "moment": sample.moment,
            }
            for sample in result.curve.samples
        ],
    }


def _answer_json(question: str, text: str, usage: Usage) -> dict[str, Any]:
    return {
        "question": question,
        "text": text,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "restored_tokens": dict(usage.restored_tokens),
        "new_tokens": usage.new_tokens,
        "ttft_s": usage.ttft_s,
    }


def show(result: DemoResult) -> None:
    """Table, plot and sentences on stdout."""
    console = Console(highlight=False)
    console.print(memory_table(result.curve))
    plot = terminal_plot(result.curve, width=min(console.width, 100))
    if plot is not None:
        console.print(plot, markup=False, no_wrap=True)
    for line in sentences(result):
        console.print(line, soft_wrap=True)


def save_plot(result: DemoResult, path: Path, console: Console) -> None:
    """Write the PNG and say where it is, or why there is none. Raises ConfigError where `path` cannot be written."""
    try:
        written = png_plot(result.curve, path)
    except OSError as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}; name another place with --png") from error
    word = f"Plot: {path}" if written else "No plot: install matplotlib and plotext, pip install 'ktransformer2[plots]'"
    console.print(word, soft_wrap=True)
