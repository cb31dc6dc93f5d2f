"""`ktransformer trace`: which blocks a real run uses, as numbers only, for `ktransformer bench policy --trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktransformer2.cli.files import check_place, read_text
from ktransformer2.cli.guard import EXIT_FAILED, fail, reported, write
from ktransformer2.cli.options import (
    DtypeOption,
    KvOption,
    MemoryOption,
    NewTokensOption,
    RunnerOption,
    WeightsOption,
    named_model,
)

trace = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@trace.callback()
def options() -> None:
    """Record which blocks requests use.

    Numbers only: no text and no tokens. Replay it with `ktransformer bench policy --trace FILE`.
    """


@trace.command()
@reported
def record(
    prompts: Annotated[Path, typer.Argument(help="A text file with one prompt a line.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Where the trace goes.")],
    model: Annotated[str | None, typer.Option(help="As in `run`; else the setting `model`.")] = None,
    memory: MemoryOption = None,
    kv: KvOption = None,
    dtype: DtypeOption = None,
    runner: RunnerOption = None,
    weights: WeightsOption = None,
    max_new_tokens: NewTokensOption = None,
) -> None:
    """Answer every prompt and record the blocks."""
    from ktransformer2 import settings
    from ktransformer2.errors import EmptyPromptError

    chosen = settings.resolve(
        {"model": model, "memory": memory, "kv": kv and kv.value, "dtype": dtype, "max_new_tokens": max_new_tokens}
        | {"runner": runner and runner.value, "weights": weights and weights.value}
    )
    name = named_model(chosen)
    lines = [line for line in read_text(prompts).splitlines() if line.strip()]
    if not lines:
        raise EmptyPromptError(f"{prompts} holds no prompt; write one a line")
    check_place(out, "--out")
    from ktransformer2.cache.trace import TraceRecorder
    from ktransformer2.engine.llm import LLM

    with LLM(name, **chosen.llm_options) as llm, out.open("w", encoding="utf-8") as file:
        recorder = llm.cache.observer = TraceRecorder(file, llm.cache.config.block_tokens)
        llm.generate(lines)
        if recorder.error is not None:
            fail(f"{out} cannot be written ({recorder.error})", EXIT_FAILED)
    write(f"{recorder.num_requests} requests in {out}\n")
