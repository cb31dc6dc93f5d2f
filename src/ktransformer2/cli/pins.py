"""`ktransformer cache pin|unpin`: texts on disk that do not make room for others. Loads no model.

A program pins in its own memory, with `llm.cache.advice.pin`; that is written to disk too, where it is not pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformer2.cli.guard import reported
from ktransformer2.cli.kept import DirectoryOption, kept_place, say_done
from ktransformer2.cli.options import JsonFlag

if TYPE_CHECKING:
    from ktransformer2.tiers.disk_listing import HeldBlock
    from ktransformer2.tiers.disk_pins import Pin

_LEAST_ID = 6  # hexadecimal digits
IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A block, as `cache ls --disk` names it; it stands for the text up to it.")
]
_Change = Callable[["set[Pin]", "set[Pin]"], "set[Pin]"]


@reported
def pin(block: IdArgument, directory: DirectoryOption = None, as_json: JsonFlag = False) -> None:
    """Keep a text on disk: it does not make room for others.

    Up to half of the directory's limit can be pinned. A pin does not prolong the time to live, `disk_ttl_s`.
    """
    _change(block, directory, lambda pins, named: pins | named)
    say_done({"id": block}, "Pinned {id}.", as_json)


@reported
def unpin(block: IdArgument, directory: DirectoryOption = None, as_json: JsonFlag = False) -> None:
    """Let a pinned text make room for others again."""
    _change(block, directory, lambda pins, named: pins - named)
    say_done({"id": block}, "Unpinned {id}.", as_json)


def _change(block: str, directory: Path | None, change: _Change) -> None:
    """Other pins, from those that there are and those of the named block.

    Raises: ConfigError for a name that is none, or where pins would have too much, or cannot be written.
    """
    from ktransformer2.errors import ConfigError
    from ktransformer2.tiers.disk_directory import locked
    from ktransformer2.tiers.disk_listing import look
    from ktransformer2.tiers.disk_pins import have_room, pin_of, read_pins, write_pins

    place, limits = kept_place(directory)
    if not place.is_dir():
        raise ConfigError(f"nothing was kept in {place}")
    entries = look(place, time.time())
    named = {pin_of(each) for each in _named(block, entries, place)}
    try:
        with locked(place, limits.lock_wait_s):
            before = read_pins(place)
            after = change(before, named)
            if after - before and not have_room(after, entries, limits.limit_bytes):
                raise ConfigError(
                    f"{block} is not pinned: with it pins would hold more than half of the limit of {place}, "
                    f"{limits.limit_bytes:,} bytes; unpin another text, or raise disk_bytes"
                )
            write_pins(place, after)
    except OSError as error:
        raise ConfigError(f"the pins of {place} cannot be changed ({error})") from error


def _named(block: str, entries: list[HeldBlock], place: Path) -> list[HeldBlock]:
    """The blocks, one a layer group, that an id means. Raises: ConfigError where it means none, or several."""
    from ktransformer2.errors import ConfigError

    if len(block) < _LEAST_ID:
        raise ConfigError(f"{block!r} is too short for an id; write at least {_LEAST_ID} digits of it")
    found = [each for each in entries if each.key.hex().startswith(block.lower())]
    if len({each.key[:-1] for each in found}) != 1:
        what = "several blocks" if len(found) > 1 else "no block"
        raise ConfigError(f"{block!r} names {what} in {place}; `ktransformer cache ls --disk` has their ids")
    return found
