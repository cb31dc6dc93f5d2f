"""What people see, to the letter, with a clock that the test turns."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator

import pytest
from rich.console import Console

from ktransformer2.console import Interrupt, Phases, PrefillBar, closing_line, follow, format_seconds
from ktransformer2.engine.outputs import Completion, RequestOutput, StreamChunk, Usage


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=100)


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.617, "0.62 s"), (41.4, "41 s"), (59.7, "1 min 00 s"), (185, "3 min 05 s")]
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_closing_line() -> None:
    usage = Usage(prompt_tokens=8012, cached_tokens=7936, new_tokens=64, ttft_s=0.61)
    assert closing_line(usage, 95_300_000) == (
        "8,012 tokens in (7,936 cached) | 64 out | first token 0.61 s | KV 95.3 MB"
    )


def test_phases_say_what_they_do_and_how_long_it_took() -> None:
    console, clock = plain_console(), Clock()
    phases = Phases(console, clock)
    with phases.phase("weights"):
        clock.now += 2
    with phases.phase("cache"):
        clock.now += 0.5
    phases.ready()
    assert lines(console) == ["weights ...", "cache ...", "ready in 2.5 s (weights 2.0, cache 0.5)"]


def test_prefill_away_from_a_terminal_is_a_line_every_five_seconds() -> None:
    console, clock = plain_console(), Clock()
    bar = PrefillBar(console, clock)
    for done in (512, 1024, 1536, 4096):
        bar.update(done, 8192)
        clock.now += 4
    bar.finish()
    bar.close()
    assert lines(console) == [
        "prefill 6 %  512/8,192",
        "prefill 18 %  1,536/8,192  128 tok/s  52 s left",
        "prefill 100 %  8,192/8,192  480 tok/s",
    ]


def test_tokens_found_in_the_cache_are_no_speed() -> None:
    console, clock = plain_console(), Clock()
    bar = PrefillBar(console, clock)
    bar.update(8000, 8192)
    clock.now += 10
    bar.update(8100, 8192)
    assert lines(console)[-1] == "prefill 98 %  8,100/8,192  10 tok/s  9.20 s left"


def test_prefill_on_a_terminal_is_a_bar() -> None:
    console, clock = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None), Clock()
    bar = PrefillBar(console, clock)
    bar.update(512, 1024)
    clock.now += 2
    bar.finish()
    assert "100 %  1,024/1,024  256 tok/s" in "".join(lines(console))


def _output() -> RequestOutput:
    return RequestOutput("r", (Completion(0, "ab", (1, 2), None, "length"),), Usage(3, 0, 2, 0.1))


def test_follow_writes_text_and_returns_the_output() -> None:
    chunks = [
        StreamChunk("r", prefill=(2, 3)),
        StreamChunk("r", text="a", token_ids=(1,)),
        StreamChunk("r", text="b", token_ids=(2,), output=_output()),
    ]
    console, written = plain_console(), list[str]()
    assert follow(chunks, written.append, console) == _output()
    assert written == ["a", "b"]
    assert [line.split("  ")[0] for line in lines(console)] == ["prefill 66 %", "prefill 100 %"]


def test_follow_closes_the_bar_when_the_engine_raises() -> None:
    def chunks() -> Iterator[StreamChunk]:
        yield StreamChunk("r", prefill=(1, 3))
        raise RuntimeError("broken")

    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with pytest.raises(RuntimeError, match="broken"):
        follow(chunks(), lambda _: None, console)
    assert console._live_stack == []  # nothing is drawn any more


def test_the_bar_is_closed_before_the_first_text_and_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    live: list[bool] = []

    def write(text: str) -> None:
        live.append(bool(console._live_stack))
        print(text, end="")

    chunks = [
        StreamChunk("r", prefill=(2, 3)),
        StreamChunk("r", text="a", token_ids=(1,), prefill=(3, 3)),
        StreamChunk("r", text="b", token_ids=(2,), output=_output()),
    ]
    follow(chunks, write, console)
    assert live == [False, False]
    assert capsys.readouterr().out == "ab"
    assert "100 %  3/3" in "".join(lines(console))


def _cancelled(text: str) -> RequestOutput:
    return RequestOutput("r", (Completion(0, text, (1,), None, "cancelled"),), Usage(3, 0, 1, 0.1))


def test_the_first_ctrl_c_ends_the_request_and_keeps_what_there_is() -> None:
    asked: list[str] = []

    def chunks() -> Iterator[StreamChunk]:
        yield StreamChunk("r", text="a", token_ids=(1,))
        os.kill(os.getpid(), signal.SIGINT)
        yield StreamChunk("r", text="b", token_ids=(2,))
        raise AssertionError("nobody reads on")

    def cancel(request_id: str) -> RequestOutput:
        asked.append(request_id)
        return _cancelled("ab<held back")

    before, written = signal.getsignal(signal.SIGINT), list[str]()
    with Interrupt(cancel) as interrupt:
        output = follow(chunks(), written.append, plain_console(), interrupt)
    assert asked == ["r"]
    assert output.finish_reason == "cancelled"
    assert "".join(written) == output.text == "ab<held back"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_ctrl_c_that_comes_with_the_last_chunk_changes_nothing() -> None:
    def chunks() -> Iterator[StreamChunk]:
        os.kill(os.getpid(), signal.SIGINT)
        yield StreamChunk("r", text="ab", token_ids=(1, 2), output=_output())

    with Interrupt(lambda _: pytest.fail("there is nothing to cancel")) as interrupt:
        assert follow(chunks(), lambda _: None, plain_console(), interrupt) == _output()


def test_a_second_ctrl_c_leaves_at_once() -> None:
    with Interrupt(lambda _: None) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
