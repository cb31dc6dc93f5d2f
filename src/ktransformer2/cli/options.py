"""Options that several commands share, each spelt once. One that is not given is left to the settings."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformer2.cli.guard import EXIT_USAGE, fail

if TYPE_CHECKING:
    from rich.console import Console

    from ktransformer2.settings import Settings


class Kv(StrEnum):
    """The form of full blocks."""

    auto = "auto"
    full = "full"
    int8 = "int8"


class Runner(StrEnum):
    """Whose forward pass a step is."""

    auto = "auto"
    lean = "lean"
    transformers = "transformers"


class Weights(StrEnum):
    """The form in which weights stay in memory."""

    dense = "dense"
    auto = "auto"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A folder, a .gguf or .safetensors file, or a hub id; else the setting `model`."),
]
KvOption = Annotated[
    Kv | None, typer.Option(help="Form of full blocks: auto (int8), full (the model's precision) or int8.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Hard limit of the cache, such as 4GB; auto: what the machine can spare."),
]
DtypeOption = Annotated[
    str | None, typer.Option(metavar="TYPE", help="What the model computes in: auto, bfloat16 or float32.")
]
RunnerOption = Annotated[
    Runner | None,
    typer.Option(help="Whose forward pass a step is: auto (lean where the model fits exactly), lean or transformers."),
]
WeightsOption = Annotated[
    Weights | None,
    typer.Option(
        help="Weights in memory: dense, auto (a quantised GGUF file as it is), or packed as bf16, int8, int4."
    ),
]
NewTokensOption = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="The answer's longest length, such as 256 or 1k.")
]
TemperatureOption = Annotated[float, typer.Option(help="0: always the most likely token.")]
TopKOption = Annotated[int, typer.Option(help="Only the k most likely tokens; 0: all.")]
TopPOption = Annotated[float, typer.Option(help="Only the likeliest tokens up to this sum of probabilities; 1: all.")]
MinPOption = Annotated[float, typer.Option(help="Only tokens this likely, relative to the likeliest; 0: all.")]
RepetitionOption = Annotated[float, typer.Option(help="Above 1: repeat less; 1: off.")]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same answer.")]
UrlOption = Annotated[
    str | None, typer.Option(help="Where a cache is served; else http://127.0.0.1:8765.", show_default=False)
]
KeyFileOption = Annotated[
    Path | None, typer.Option(help="A file that holds the server's key.", exists=True, dir_okay=False)
]
PersistFlag = Annotated[
    bool | None,
    typer.Option(
        "--persist/--no-persist",
        help="Keep what was read on disk, for the next time; else the setting `persist`, which is on here.",
        show_default=False,
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="The result as one JSON object.")]


def some(written: str, parse: Callable[[str], int], option: str) -> int:
    """What `parse` makes of an option, 1 or more. Raises ConfigError that names the option."""
    from ktransformer2.errors import ConfigError

    try:
        value = parse(written)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
    if value < 1:
        raise ConfigError(f"{option}: {written!r} is not allowed; allowed: 1 or more")
    return value


def persistence(flag: bool | None) -> str | None:
    """The flag as the setting `persist` has it; None: nothing was said."""
    return None if flag is None else "on" if flag else "off"


def llm_options(settings: Settings) -> dict[str, Any]:
    """What `LLM` is opened with here: unlike a library, a command keeps what it reads, unless it is told not to.

    Where the user's cache directory lies on a network that is not kept, and said on stderr.
    """
    from ktransformer2.config import TierConfig
    from ktransformer2.tiers.disk_directory import network_file_system
    from ktransformer2.tiers.opening import disk_directory

    options = settings.llm_options
    if options["persist"] != "auto":
        return options
    directory = disk_directory(TierConfig.load(settings.tier_values))
    kind = network_file_system(directory)
    if kind is not None:
        typer.echo(
            f"Nothing is kept for the next time: {directory} lies on a network file system ({kind}). Name a local "
            "directory with KTRANSFORMER_DISK_DIRECTORY, or say --no-persist.",
            err=True,
        )
    return options | {"persist": "on" if kind is None else "off"}


def named_model(settings: Settings) -> str:
    """The model that a flag or a setting names; exits with 2 where none does."""
    if settings.model is None:
        fail(
            "no model is named; name one behind the command, or set KTRANSFORMER_MODEL, or model = ... in "
            "ktransformer.toml",
            EXIT_USAGE,
        )
    return settings.model


def say_kernels(console: Console) -> str:
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
