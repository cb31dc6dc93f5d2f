"""`ktransformer serve`: a model behind an OpenAI-compatible server, until Ctrl-C."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformer2.cli.guard import reported
from ktransformer2.cli.opening import Opening
from ktransformer2.cli.options import (
    DtypeOption,
    KvOption,
    MemoryOption,
    ModelArgument,
    NewTokensOption,
    PersistFlag,
    WeightsOption,
    persistence,
    say_kernels,
    some,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ktransformer2.cli.keeping import Keeping
    from ktransformer2.engine.llm import LLM
    from ktransformer2.server.serving import Opened


@reported
def serve(
    model: ModelArgument = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; beyond this machine a key is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 8765,
    key_file: Annotated[
        Path | None,
        typer.Option(help="A file of lines NAME KEY, or NAME KEY admin: who may ask.", exists=True, dir_okay=False),
    ] = None,
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="All keys share what is cached; else each has its own.")
    ] = False,
    name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be given again. Else its own name.")
    ] = None,
    memory: MemoryOption = None,
    kv: KvOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    max_new_tokens: NewTokensOption = None,
    persist: PersistFlag = None,
    max_concurrent: Annotated[int, typer.Option(help="Requests of one key at once.", min=1)] = 64,
    max_kv: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Cache that the running requests of one key may need, such as 1GB; else all."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.", min=1)] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that running answers have left at the end.", min=0)] = 30.0,
    log_json: Annotated[bool, typer.Option("--log-json", help="Logs as lines of JSON.")] = False,
) -> None:
    """Serve a model to OpenAI clients.

    Loopback only, unless --host says otherwise. Ctrl-C lets running answers end and keeps the cache.
    """
    opening = Opening.of(
        {"model": model, "memory": memory, "kv": kv, "dtype": dtype, "max_new_tokens": max_new_tokens}
        | {"weights": weights, "persist": persistence(persist)}
    )
    _require_extra()
    from ktransformer2.cli.keeping import Keeping
    from ktransformer2.config import parse_bytes
    from ktransformer2.console import Phases, stderr_console
    from ktransformer2.server.limits import Limits
    from ktransformer2.server.serving import Address, open_address, run

    limits = Limits(
        request_s=timeout,
        concurrent=max_concurrent,
        kv_bytes=None if max_kv is None else some(max_kv, parse_bytes, "--max-kv"),
        drain_s=drain,
    )
    console = stderr_console()
    opened = open_address(Address(host, port), key_file, share_prefixes=share_prefixes)
    keepings: list[Keeping] = []

    def open_llm() -> LLM:
        """In the engine's thread."""
        from ktransformer2.engine.llm import LLM

        phases = Phases(console)
        say_kernels(console)
        with phases.phase("weights"):
            llm = LLM(opening.model, **opening.options)
        keepings.append(Keeping(llm, opening.model, console))
        phases.ready()
        _say_where(opened, console)
        return llm

    try:
        with _logs(log_json):
            run(opened, open_llm, name or served_names(opening.model), limits)
    finally:
        for keeping in keepings:
            keeping.end()


def served_names(model: str) -> list[str]:
    """What clients call a model: a hub id and its last part, or the name of a folder or file. Never a path."""
    short = Path(model).name.removesuffix(".gguf").removesuffix(".safetensors") or "model"
    is_hub_id = not Path(model).exists() and model.count("/") == 1 and not model.startswith(("/", "."))
    return [model, short] if is_hub_id else [short]


def _require_extra() -> None:
    """Raises: ConfigError."""
    from ktransformer2.errors import ConfigError

    missing = [package for package in ("fastapi", "uvicorn", "llguidance") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f'serving needs {", ".join(missing)}; pip install "ktransformer2[serve]" brings them')


def _say_where(opened: Opened, console: Console) -> None:
    if opened.made_key:
        console.print(f"key   {opened.made_key}   (made for this run; --key-file keeps keys)", highlight=False)
    whose = "needed" if opened.access.keys.are_needed else "none, this machine only"
    console.print(f"API   {opened.url}/v1 (key: {whose})", highlight=False, soft_wrap=True)
    console.print(f"cache {opened.url}/v1/cache/stats   metrics {opened.url}/metrics   stop Ctrl-C", highlight=False)


@contextmanager
def _logs(as_json: bool) -> Iterator[None]:
    """What the server has to say goes to stderr."""
    from ktransformer2.server.status_line import JsonLines

    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger, of_uvicorn = logging.getLogger("ktransformer2"), logging.getLogger("uvicorn.error")
    before = logger.level
    logger.setLevel(logging.INFO)
    for each in (logger, of_uvicorn):
        each.addHandler(handler)
    try:
        yield
    finally:
        for each in (logger, of_uvicorn):
            each.removeHandler(handler)
        logger.setLevel(before)
