"""`ktransformer bench`: what is promised, measured."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ktransformer2.cli.files import check_place
from ktransformer2.cli.guard import reported
from ktransformer2.cli.options import some


class Bench(StrEnum):
    """The scenarios, and the list of their targets."""

    attention = "attention"
    decode = "decode"
    memory = "memory"
    fidelity = "fidelity"
    architectures = "architectures"
    plan = "plan"
    dropin = "dropin"
    monitor = "monitor"
    policy = "policy"
    tiers = "tiers"
    prefix = "prefix"
    overhead = "overhead"
    linear = "linear"
    peers = "peers"
    serve = "serve"
    status = "status"


@reported
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
    max_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="The longest prompt, such as 8192 or 32k.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Another model than the pinned one.")] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Only this part; may be given again. A wrong name lists them."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="fidelity only: keep what is done in files of this name; a later run goes on from there."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="serve only: any OpenAI-compatible server, else one of our own; its key in OPENAI_API_KEY."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="policy only: replay this trace of your own.", exists=True, dir_okay=False)
    ] = None,
    touches: Annotated[
        int | None, typer.Option(help="policy only: agents' sessions with so many uses of blocks.", min=1)
    ] = None,
) -> None:
    """Measure what is promised.

    Each figure stands against a named rival on this machine.
    """
    if json_path is not None and name is not Bench.status:  # the status reads it
        check_place(json_path, "--json")
    from ktransformer2.bench.outcome import BenchOptions
    from ktransformer2.bench.run import main as run_bench
    from ktransformer2.config import parse_tokens

    seeded = {} if seed is None else {"seed": seed}
    options = BenchOptions(
        quick=quick,
        dtype=dtype,
        num_prompts=prompts,
        max_tokens=None if max_tokens is None else some(max_tokens, parse_tokens, "--max-tokens"),
        model=model,
        parts=tuple(part or ()),
        trace=None if trace is None else str(trace),
        url=url,
        num_touches=touches,
        resume=None if resume is None else str(resume),
        **seeded,
    )
    raise typer.Exit(run_bench(name.value, quick=quick, json_path=json_path, check=check, options=options))
