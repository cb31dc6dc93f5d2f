"""What a person sees while a model works: start-up phases, the prefill bar, the line after an answer.

Results go where the caller says; everything here goes to the console it is handed, which is stderr. Knows no engine,
only what an engine gives out. On a terminal the bar is redrawn in place; elsewhere a line comes every few seconds.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ktransformer2.config import format_bytes
from ktransformer2.engine.outputs import RequestOutput, StreamChunk, Usage

PLAIN_INTERVAL_S = 5.0


def stderr_console() -> Console:
    """A console on stderr, without colour where NO_COLOR says so or stderr is no terminal."""
    return Console(stderr=True, highlight=False)


def format_seconds(seconds: float) -> str:
    """0.62 s, 41 s, 3 min 05 s."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


def closing_line(usage: Usage, kv_bytes: int | None = None) -> str:
    """What an answer cost: tokens in, of them cached, out, time to the first token, bytes of the cache if known.

    Where a tier had kept some: `restored` from there, and `reused` in all.
    """
    cached = f"{usage.cached_tokens:,} cached"
    if usage.num_restored:
        cached = f"restored {usage.num_restored:,}, reused {usage.cached_tokens:,}"
    first = "none" if usage.ttft_s is None else format_seconds(usage.ttft_s)
    kv = "" if kv_bytes is None else f" | KV {format_bytes(kv_bytes)}"
    return f"{usage.prompt_tokens:,} tokens in ({cached}) | {usage.new_tokens:,} out | first token {first}{kv}"


class Phases:
    """The start, step by step with times, and a last line with their sum."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._console, self._clock = console, clock
        self._times: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside; says so on the console at once, since a phase may take long."""
        self._console.print(f"{name} ...", style="dim")
        began = self._clock()
        yield
        self._times.append((name, self._clock() - began))

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._times)

    def ready(self) -> None:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._times)
        self._console.print(f"ready in {sum(s for _, s in self._times):.1f} s ({parts})", style="dim")


class PrefillBar:
    """How far a prompt is read, how fast, and how long it will take.

    Speed is taken from the first update on: what was done by then may have been found in the cache.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._console, self._clock = console, clock
        self._began = 0.0
        self._first: int | None = None  # tokens read at the first update: from the cache, or one chunk
        self._done = self._total = 0
        self._last_line = -PLAIN_INTERVAL_S
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def update(self, done: int, total: int) -> None:
        """`done` of `total` prompt tokens are read."""
        now = self._clock()
        if self._first is None:
            self._began, self._first = now, done
        self._done, self._total = done, total
        elapsed = now - self._began
        text = self._text(done, total, elapsed)
        if self._console.is_terminal:
            self._draw(done, total, text)
        elif elapsed - self._last_line >= PLAIN_INTERVAL_S or done >= total:
            self._last_line = elapsed
            self._console.print(f"prefill {100 * done // max(total, 1)} %  {text}", soft_wrap=True)

    def finish(self) -> None:
        """The first token is there, so the prompt is read. Without an update before, there was nothing worth a bar."""
        if self._first is not None and self._done < self._total:
            self.update(self._total, self._total)
        self.close()

    def close(self) -> None:
        """Leave the bar as it stands. Again: nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _text(self, done: int, total: int, elapsed: float) -> str:
        read = done - (self._first or 0)
        rate = read / elapsed if read > 0 and elapsed > 0 else 0.0
        left = f"  {format_seconds((total - done) / rate)} left" if rate and done < total else ""
        speed = f"  {rate:,.0f} tok/s" if rate else ""
        return f"{done:,}/{total:,}{speed}{left}"

    def _draw(self, done: int, total: int, text: str) -> None:
        if self._progress is None:
            columns = (TextColumn("prefill"), BarColumn(), TextColumn("{task.percentage:>3.0f} %  {task.fields[text]}"))
            # What others write is left alone: rich would carry answers from stdout over to stderr.
            self._progress = Progress(*columns, console=self._console, redirect_stdout=False, redirect_stderr=False)
            self._task = self._progress.add_task("", total=total, completed=done, text=text)
            self._progress.start()
        self._progress.update(self._task, completed=done, text=text)


class Interrupt:
    """Ctrl-C while an answer is made: the first one asks to stop, a second one leaves at once.

    Side effect inside the `with`: the first SIGINT raises nothing, so that no step is cut in its middle and everything
    that was computed stays in the cache. Only for the main thread, as signals are.
    """

    def __init__(self, cancel: Callable[[str], RequestOutput | None]) -> None:
        """`cancel` ends a request by its id and says what it has so far: `Engine.cancel`."""
        self.cancel = cancel
        self.requested = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def follow(
    chunks: Iterable[StreamChunk],
    write: Callable[[str], None],
    console: Console,
    interrupt: Interrupt | None = None,
) -> RequestOutput:
    """Show a stream until it ends: the prefill bar on `console`, text through `write`. Returns the finished request.

    An `interrupt` that asks to stop ends the request between two steps; its output is "cancelled", with what there is.
    Raises what the engine raises; KeyboardInterrupt passes too. The bar is closed in any case.
    """
    bar = PrefillBar(console)
    output: RequestOutput | None = None
    num_written = 0
    try:
        for chunk in chunks:
            if chunk.prefill is not None:
                bar.update(*chunk.prefill)
            if chunk.token_ids:
                bar.finish()  # before any text: both may be on one screen
            if chunk.text:
                write(chunk.text)
                num_written += len(chunk.text)
            output = chunk.output or output
            if interrupt is not None and interrupt.requested and output is None:
                output = interrupt.cancel(chunk.request_id)
                break
    finally:
        bar.close()
    assert output is not None, "a stream ended without an output"
    if held_back := output.text[num_written:]:  # the beginning of a stop string that did not come
        write(held_back)
    return output
