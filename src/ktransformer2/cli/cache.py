"""`ktransformer cache`: a look into a running cache over HTTP (figures, blocks, why a prompt was missed), and into what
lies on disk (`kept`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformer2.cli import kept, pins
from ktransformer2.cli.guard import EXIT_USAGE, fail, reported, write
from ktransformer2.cli.options import JsonFlag, KeyFileOption, UrlOption

if TYPE_CHECKING:
    from ktransformer2.engine.detokenizer import Tokenizer

cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
_AROUND = 8


@cache.callback()
def options() -> None:
    """Look into a running cache, or into what was kept on disk.

    A running one must be served: `ktransformer2.monitor.serve_metrics(llm.cache, port=8765)`.
    """


@cache.command()
@reported
def stats(url: UrlOption = None, key_file: KeyFileOption = None, as_json: JsonFlag = False) -> None:
    """Print the figures of a cache; ktransformer-monitor has more ways to."""
    from ktransformer2.cli import looking

    show = looking.Shower(["cache_stats"], "json" if as_json else "text", clears=False)
    for look in looking.fetched(url, key_file, None):
        show(look)


@cache.command()
@reported
def ls(
    start: Annotated[int, typer.Option(help="The place of the first block.", min=0)] = 0,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=1000)] = 100,
    disk: Annotated[bool, typer.Option("--disk", help="What lies on disk instead of a running cache.")] = False,
    directory: kept.DirectoryOption = None,
    url: UrlOption = None,
    key_file: KeyFileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List blocks: state, rows, bytes, ages; no text."""
    from ktransformer2.bench.report import table
    from ktransformer2.cli import looking

    if disk:
        kept.listed(start, limit, directory, as_json)
        return
    page = looking.client(url, key_file).blocks(start, limit)
    if as_json:
        write(json.dumps(page) + "\n")
        return
    rows = [{name.replace("_", " "): value for name, value in block.items()} for block in page["blocks"]]
    following = page["next_start"]
    write((table(rows) or "No block.") + "\n" + (f"More: --start {following}\n" if following is not None else ""))


@cache.command()
@reported
def explain(
    prompt: Annotated[str, typer.Argument(help="A file with the prompt's token ids as a JSON list; - for stdin.")],
    model: Annotated[
        str | None, typer.Option(help="The file holds text: encode it as this model does.", show_default=False)
    ] = None,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="With --model: also the text around the place that is named.")
    ] = False,
    salt: Annotated[str, typer.Option(help="The salt of the request.")] = "",
    url: UrlOption = None,
    key_file: KeyFileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Say why a prompt is not found, or not whole.

    It asks the cache as it is now: ask before the prompt is read again.
    """
    from ktransformer2.cli import looking

    if show_text and model is None:
        fail("--show-text needs --model, whose tokenizer knows the text", EXIT_USAGE)
    content = _read(prompt)
    tokenizer = None if model is None else _tokenizer(model)
    token_ids = _token_ids(content, prompt) if tokenizer is None else tokenizer.encode(content)
    found = looking.client(url, key_file).explain(token_ids, salt)
    place = int(found["position"])
    if tokenizer is not None and show_text:
        found["before"] = tokenizer.decode(token_ids[max(0, place - _AROUND) : place])
        found["there"] = tokenizer.decode(token_ids[place : place + 1])
    write(json.dumps(found, ensure_ascii=False) + "\n" if as_json else _sentence(found))


cache.command()(pins.pin)
cache.command()(pins.unpin)
cache.command()(kept.gc)
cache.command()(kept.clear)
cache.command()(kept.export)
cache.command("import")(kept.import_)


def _sentence(found: dict[str, Any]) -> str:
    around = (
        f"token {found['position']:,} is {found['there']!r}, after {found['before']!r}\n" if "there" in found else ""
    )
    return f"{found['text']}\n{around}"


def _read(prompt: str) -> str:
    from ktransformer2.cli.files import read_text
    from ktransformer2.errors import ConfigError

    if prompt != "-":
        return read_text(Path(prompt))
    try:
        return sys.stdin.read()
    except UnicodeError as error:
        raise ConfigError("stdin is no UTF-8 text") from error


def _token_ids(content: str, name: str) -> list[int]:
    from ktransformer2.errors import ConfigError

    try:
        found = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{name} is no JSON list of token ids ({error}); for a text name its --model") from error
    if not isinstance(found, list):
        raise ConfigError(f"{name} holds no list of token ids, such as [1, 2, 3]; for a text name its --model")
    return found


def _tokenizer(model: str) -> Tokenizer:
    from ktransformer2.models.loading import load_tokenizer

    return load_tokenizer(model)
