"""`ktransformer plan`: what a model and a context will take, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformer2.cli.guard import EXIT_DOES_NOT_FIT, fail, reported, write
from ktransformer2.cli.options import (
    DtypeOption,
    JsonFlag,
    KvOption,
    MemoryOption,
    ModelArgument,
    WeightsOption,
    named_model,
    some,
)

if TYPE_CHECKING:
    from ktransformer2.engine.plan import Plan


@reported
def plan(
    model: ModelArgument = None,
    ctx: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Tokens of one text, answer included, such as 128k; else the model's own."),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Texts of that length at once.", min=1)] = 1,
    total: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the whole process may take, such as 8GB.")
    ] = None,
    memory: MemoryOption = None,
    kv: KvOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what a model and a context will take, before anything is loaded.

    Reads the config and the headers of the weight files, of a hub model too. Exits with 4 where it does not fit, and
    says what would.
    """
    from ktransformer2 import settings
    from ktransformer2.config import CacheConfig, EngineConfig, parse_bytes, parse_tokens

    flags = {"model": model, "memory": memory, "kv": kv and kv.value, "dtype": dtype}
    chosen = settings.resolve(flags | {"weights": weights and weights.value})
    name = named_model(chosen)
    from ktransformer2.engine import plan as planning
    from ktransformer2.engine.memory_budget import Memory
    from ktransformer2.models.outline import outline_of

    process_bytes = planning.idle_process_bytes()
    wish = planning.Wish(
        num_tokens=None if ctx is None else some(ctx, parse_tokens, "--ctx"),
        num_sequences=sequences,
        total_bytes=None if total is None else some(total, parse_bytes, "--total"),
        memory_bytes=None if chosen.memory == "auto" else parse_bytes(chosen.memory),
        cache=CacheConfig.load(chosen.cache_values),
        engine=EngineConfig.load(chosen.engine_values),
    )
    machine = Memory.measure().less(chosen.values["host_bytes"])
    outline = outline_of(name, **{how: chosen.values[how] for how in ("dtype", "weights", "runner")})
    found = planning.plan(outline, wish, process_bytes, machine)
    write(json.dumps(as_object(found), indent=1) + "\n" if as_json else shown(found))
    if not found.fits:
        told, *ways = found.advice
        fail(f"does not fit: {told}. Try {'; or '.join(ways)}", EXIT_DOES_NOT_FIT)


def as_object(found: Plan) -> dict[str, Any]:
    """The plan's fields, and what follows from them."""
    return dataclasses.asdict(found) | {"peak_bytes": found.peak_bytes, "fits": found.fits}


def shown(found: Plan) -> str:
    """A column for each form of full blocks, then what a table cannot say."""
    from ktransformer2.bench.report import table
    from ktransformer2.config import format_bytes

    parts: list[tuple[str, list[str]]] = [
        ("process", [format_bytes(found.process_bytes)] * len(found.forms)),
        ("weights", [format_bytes(found.weight_bytes)] * len(found.forms)),
        ("workspace", [format_bytes(found.workspace_bytes)] * len(found.forms)),
        ("KV", [format_bytes(form.kv_bytes) for form in found.forms]),
        ("tables", [format_bytes(form.table_bytes) for form in found.forms]),
        ("total", [format_bytes(form.total_bytes) for form in found.forms]),
        ("cache limit", [format_bytes(form.limit_bytes) for form in found.forms]),
        ("longest context", [f"{form.longest_tokens:,}" for form in found.forms]),
        ("fits", ["yes" if form.fits else "no" for form in found.forms]),
    ]
    heads = [f"{form.form} (chosen)" if form.kv == found.chosen else form.form for form in found.forms]
    texts = "1 text" if found.num_sequences == 1 else f"{found.num_sequences} texts"
    packed = "" if found.weights == "dense" else f" over {found.weights} weights"
    lines = [
        f"{found.model}: {found.architecture}, {found.num_layers} layers, {found.dtype}{packed}. {texts} of "
        f"{found.num_tokens:,} tokens.",
        "",
        table([{"blocks in": part, **dict(zip(heads, cells, strict=True))} for part, cells in parts]),
        "",
        f"Peak of the process: {format_bytes(found.peak_bytes)}.",
    ]
    loading = found.process_bytes + found.loading_bytes
    if loading > found.choice.total_bytes:
        lines.append(
            f"That is while loading, when files of another type are mapped beside the weights; then "
            f"{format_bytes(found.choice.total_bytes)}."
        )
    if found.unpacking_bytes:
        lines.append(
            f"The first load unpacks the GGUF file once, which takes {format_bytes(found.unpacking_bytes)} beside the "
            "process."
        )
    return "\n".join(lines) + "\n"
