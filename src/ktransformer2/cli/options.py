"""Options that several commands share, each spelt once."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console


class Kv(StrEnum):
    """The form of full blocks."""

    auto = "auto"
    full = "full"
    int8 = "int8"


ModelArgument = Annotated[str, typer.Argument(help="A folder, a .gguf or .safetensors file, or a hub id.")]
KvOption = Annotated[Kv, typer.Option(help="Form of full blocks: auto (int8), full (the model's precision) or int8.")]
MemoryOption = Annotated[
    str, typer.Option(help="Hard limit of the cache, such as 4GB; auto: what the machine can spare.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="The result as one JSON object.")]


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
