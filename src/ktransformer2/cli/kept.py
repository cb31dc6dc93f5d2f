"""`ktransformer cache gc|clear|export|import` and `ls --disk`: what lies on disk for the next time. Loads no model."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformer2.cli.guard import reported, write
from ktransformer2.cli.options import JsonFlag

if TYPE_CHECKING:
    from ktransformer2.config import TierConfig
    from ktransformer2.tiers.disk import DiskTier
    from ktransformer2.tiers.disk_store import DiskLimits

_ID_LENGTH = 12  # hexadecimal digits
DirectoryOption = Annotated[
    Path | None,
    typer.Option(help="Where blocks lie; else the setting `disk_directory`.", file_okay=False, show_default=False),
]


@reported
def gc(directory: DirectoryOption = None, as_json: JsonFlag = False) -> None:
    """Give back what nobody can use: older formats, what outlived its time, holes."""
    _free(directory, as_json, lambda tier: tier.gc(), "Freed {freed} in {directory}.")


@reported
def clear(
    directory: DirectoryOption = None,
    server: Annotated[
        bool, typer.Option("--server", help="Instead what this deployment keeps on the server of `valkey_url`.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete everything that was kept on disk, of every model, and the conversation that chat --continue has."""
    from ktransformer2.cli.last_chat import forget_last_chat

    if server:
        _clear_server(as_json)
        return
    sentence = "Deleted {freed} in {directory}."
    if directory is None and forget_last_chat():
        sentence += " The last conversation is gone too."
    _free(directory, as_json, lambda tier: tier.clear(), sentence)


@reported
def export(
    file: Annotated[Path, typer.Argument(help="The safetensors file to write.", dir_okay=False)],
    directory: DirectoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write what was kept on disk into one file, for another machine."""
    from ktransformer2.cli.files import check_place
    from ktransformer2.errors import ConfigError
    from ktransformer2.tiers.exchange import export_blocks

    check_place(file, "FILE")
    place, limits = kept_place(directory)
    if not place.is_dir():
        raise ConfigError(f"nothing was kept in {place}")
    try:
        done = export_blocks(place, limits, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error})") from error
    found = {"num_blocks": done.num_blocks, "num_bytes": done.num_bytes, "file": str(file)}
    say_done(found, "Wrote {num_blocks:,} blocks, {size}, to {file}.", as_json)


@reported
def import_(
    file: Annotated[Path, typer.Argument(help="What `cache export` wrote. Its content is trusted.", exists=True)],
    directory: DirectoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep the blocks of a file on disk, as if they had been read here."""
    from ktransformer2.tiers.exchange import import_blocks

    place, limits = kept_place(directory)
    done = import_blocks(place, limits, file)
    found = {"num_blocks": done.num_blocks, "num_bytes": done.num_bytes, "directory": str(place)}
    say_done(found, "Kept {num_blocks:,} blocks, {size}, in {directory}.", as_json)


def listed(start: int, limit: int, directory: Path | None, as_json: bool) -> None:
    """What `cache ls --disk` prints: a line a block, the newest use first; no text.

    The id is the beginning of the block's prefix hash: of a text and all before it.
    """
    from ktransformer2.bench.report import table
    from ktransformer2.tiers.disk_listing import look
    from ktransformer2.tiers.disk_pins import pin_of, read_pins

    place, _ = kept_place(directory)
    entries, pins = (look(place, time.time()), read_pins(place)) if place.is_dir() else ([], set())
    rows = [
        {
            "id": each.key.hex()[:_ID_LENGTH],
            "model": each.fingerprint.hex()[:12],
            "group": each.key[-1],
            "tokens": each.num_tokens,
            "bytes": each.num_bytes,
            "unused_s": round(each.age_s),
            "pinned": pin_of(each) in pins,
        }
        for each in entries[start : start + limit]
    ]
    models = Counter(each.fingerprint for each in entries)
    about = {"directory": str(place), "num_blocks": len(entries), "num_models": len(models), "blocks": rows}
    if as_json:
        write(json.dumps(about) + "\n")
        return
    more = f"More: --disk --start {start + limit}\n" if start + limit < len(entries) else ""
    shown = table([{name.replace("_", " "): value for name, value in row.items()} for row in rows])
    write(f"{shown or 'No block.'}\n{len(entries):,} blocks of {len(models)} models in {place}\n{more}")


def kept_place(directory: Path | None) -> tuple[Path, DiskLimits]:
    """The directory and its bounds, from the settings in force."""
    from ktransformer2.tiers.opening import disk_directory, disk_limits

    config = _tier_config({} if directory is None else {"disk_directory": str(directory)})
    return disk_directory(config), disk_limits(config)


def _tier_config(flags: dict[str, str]) -> TierConfig:
    """The settings in force."""
    from ktransformer2 import settings
    from ktransformer2.config import TierConfig

    return TierConfig.load(settings.resolve().tier_values | flags)


def _free(directory: Path | None, as_json: bool, free: Callable[[DiskTier], int], sentence: str) -> None:
    """Have a directory give bytes back, and say how many.

    Raises: ConfigError where something was left undone: who deletes must not be told that it is done.
    """
    from ktransformer2.errors import ConfigError
    from ktransformer2.tiers.disk import DiskTier

    place, limits = kept_place(directory)
    freed = 0
    if place.is_dir():
        tier = DiskTier(place, limits)
        freed = free(tier)
        tier.close()
        if tier.off_reason is not None:
            raise ConfigError(tier.off_reason)
        if failures := tier.stats().failures:
            kinds = ", ".join(f"{kind} {count}" for kind, count in failures.items())
            raise ConfigError(f"{place}: not everything could be done ({kinds}); end what uses it, and try again")
    say_done({"freed_bytes": freed, "directory": str(place)}, sentence, as_json)


def _clear_server(as_json: bool) -> None:
    """Raises: ConfigError as `_free`, and where no server is set."""
    from ktransformer2.errors import ConfigError
    from ktransformer2.tiers.opening import server_of
    from ktransformer2.tiers.tier import Lineage
    from ktransformer2.tiers.valkey import ValkeyTier

    config = _tier_config({})
    if not config.valkey_url:
        raise ConfigError("no server is set; name one as valkey_url, or leave --server out")
    address, deployment = server_of(config)
    tier = ValkeyTier(address, Lineage(bytes(32), (), ()), deployment)
    freed = tier.clear()
    failures = tier.stats().failures
    tier.close()
    if failures:
        kinds = ", ".join(f"{kind} {count}" for kind, count in failures.items())
        raise ConfigError(f"the server did not do everything ({kinds}); see that it is there, and try again")
    say_done({"freed_bytes": freed}, "Deleted {freed} on the server.", as_json)


def say_done(found: dict[str, object], sentence: str, as_json: bool) -> None:
    from ktransformer2.config import format_bytes

    sizes = {name: format_bytes(value) for name, value in found.items() if isinstance(value, int)}
    words = {"freed": sizes.get("freed_bytes", ""), "size": sizes.get("num_bytes", "")}
    write(json.dumps(found) + "\n" if as_json else sentence.format(**found, **words) + "\n")
