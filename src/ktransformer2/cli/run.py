"""`ktransformer run`: one prompt, one answer."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformer2.cli.guard import EXIT_FAILED, EXIT_USAGE, fail, reported, write
from ktransformer2.cli.options import JsonFlag, Kv, KvOption, MemoryOption, ModelArgument, say_kernels

if TYPE_CHECKING:
    from ktransformer2.engine.llm import LLM
    from ktransformer2.engine.outputs import RequestOutput


@reported
def run(
    model: ModelArgument,
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
    text = prompt_text(prompt, file)
    from ktransformer2.console import Phases, closing_line, follow, stderr_console

    console = stderr_console()
    phases = Phases(console)
    with phases.phase("libraries"):
        from ktransformer2.engine.llm import LLM
        from ktransformer2.engine.sampling import SamplingParams
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    kernels = say_kernels(console)
    with phases.phase("weights"):
        llm = LLM(model, kv=kv.value, memory=memory)
    with llm:
        phases.ready()
        chat = bool(llm.tokenizer.chat_template) and not raw
        chunks = llm.stream_chat([{"role": "user", "content": text}], params) if chat else llm.stream(text, params)
        output = follow(chunks, (lambda _: None) if as_json else write, console)
        stats = llm.cache.stats()
        kv_bytes = stats.peak_bytes
    write(json.dumps(_run_json(output, kv_bytes, kernels, llm), ensure_ascii=False) + "\n" if as_json else "\n")
    console.print(closing_line(output.usage, kv_bytes), style="bold")


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
