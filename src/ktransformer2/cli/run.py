"""`ktransformer run`: one prompt, one answer."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformer2.cli.guard import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, fail, reported, write
from ktransformer2.cli.opening import Opening
from ktransformer2.cli.options import (
    DtypeOption,
    JsonFlag,
    KvOption,
    MemoryOption,
    MinPOption,
    ModelArgument,
    NewTokensOption,
    PersistFlag,
    RepetitionOption,
    RunnerOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    persistence,
)

if TYPE_CHECKING:
    from ktransformer2.engine.llm import LLM
    from ktransformer2.engine.outputs import RequestOutput


@reported
def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to ask; else it is read from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A text to read before the prompt.", exists=True, dir_okay=False)
    ] = None,
    memory: MemoryOption = None,
    kv: KvOption = None,
    dtype: DtypeOption = None,
    runner: RunnerOption = None,
    weights: WeightsOption = None,
    max_new_tokens: NewTokensOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    seed: SeedOption = None,
    persist: PersistFlag = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; do not use the model's chat format.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Answer one prompt."""
    opening = Opening.of(
        {"model": model, "memory": memory, "kv": kv, "dtype": dtype, "runner": runner}
        | {"weights": weights, "max_new_tokens": max_new_tokens, "persist": persistence(persist)},
        **{"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
        **{"repetition_penalty": repetition_penalty, "seed": seed},
    )
    text = prompt_text(prompt, file)
    from ktransformer2.console import Interrupt, closing_line, follow, stderr_console

    console = stderr_console()
    with opening.opened(console) as (llm, _):
        chat = bool(llm.tokenizer.chat_template) and not raw
        messages = [{"role": "user", "content": text}]
        chunks = llm.stream_chat(messages, opening.params) if chat else llm.stream(text, opening.params)
        with Interrupt(llm.engine.cancel) as interrupt:
            output = follow(chunks, (lambda _: None) if as_json else write, console, interrupt)
        found = _run_json(output, llm)
    write(json.dumps(found, ensure_ascii=False) + "\n" if as_json else "\n")
    console.print(closing_line(output.usage, found["kv_bytes"]), style="bold")
    if output.finish_reason == "cancelled":
        fail("interrupted", EXIT_INTERRUPTED)


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """File, then prompt; stdin where there is no prompt. Exits with 2 where there is neither.

    Raises: EmptyPromptError where they hold nothing.
    """
    from ktransformer2.errors import EmptyPromptError

    can_read = sys.stdin is not None and not sys.stdin.isatty()
    if prompt is None and file is None and not can_read:
        fail("there is no prompt; give --prompt, --file, or text on stdin", EXIT_USAGE)
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
        fail(f"{place} is no UTF-8 text", EXIT_FAILED)
    except OSError as error:
        fail(f"{place} cannot be read ({error})", EXIT_FAILED)
    text = "\n\n".join(part.strip("\n") for part in parts if part.strip())
    if not text:
        raise EmptyPromptError("the prompt is empty; it must hold at least one character")
    return text


def _run_json(output: RequestOutput, llm: LLM) -> dict[str, Any]:
    from ktransformer2.engine.snapshot import Snapshot
    from ktransformer2.kernels.attention import backend_name

    usage, snapshot = output.usage, Snapshot(llm.cache.stats(), llm.stats())
    return {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "restored_tokens": dict(usage.restored_tokens),
        "new_tokens": usage.new_tokens,
        "ttft_s": usage.ttft_s,
        "kv_bytes": snapshot.cache.peak_bytes,
        "stats": snapshot.as_json(),
        "kernels": backend_name(),
        "runner": llm.runner,
        "weights": llm.weights,
        "model": str(llm.source),
    }
