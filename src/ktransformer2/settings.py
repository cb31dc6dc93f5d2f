"""Every knob's value and where it came from: flag > KTRANSFORMER_* > project TOML > user TOML > default.

The knobs are the fields of `CacheConfig`, `EngineConfig` and `TierConfig`, with `memory` ("auto" or a size) for
`memory_bytes`, and what a command loads: `model`, `dtype`, `runner` and `weights`. The project's TOML is
`ktransformer.toml` in the current folder, else `[tool.ktransformer]` of `pyproject.toml` there; the user's is
`config.toml` in the user's config directory.

`merge` is pure; `resolve` reads the files and the environment first. Knows no model and no cache.
Invariant: a key that nobody knows is an error that names its place and the nearest name; it is never passed over.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ktransformer2.config import CacheConfig, EngineConfig, TierConfig, knob, parse_bytes, parse_tokens
from ktransformer2.errors import ConfigError

PREFIX = "KTRANSFORMER_"
PROJECT_FILE, PYPROJECT, USER_FILE = "ktransformer.toml", "pyproject.toml", "config.toml"
DEFAULT = "default"
_TOOL = "ktransformer"  # of `pyproject.toml`: [tool.ktransformer]
_NEAR_TOOL = re.compile(rf"{_TOOL}[-_.]?(s|[0-9]+)?", re.IGNORECASE)
_OUR_TABLE = re.compile(rf"""^[ \t]*(\[?[ \t]*["']?tool["']?[ \t]*\.[ \t]*)?["']?{_TOOL}\b""", re.MULTILINE)
# Variables of the program, its build and its tests that set no knob.
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("KERNELS", "CACHE", "REQUIRE_NATIVE", "NO_NATIVE", "REQUIRE_DATA", "DATA", "BENCH_DATA", "WHEEL"),
        "VALKEY_KEY",
    )
)


@dataclass(frozen=True)
class StartConfig:
    """What a command loads and how much it may take."""

    model: str = knob("", "what a command loads when it names no model", chosen_by="no default")
    dtype: str = knob(
        "auto",
        "what the model computes in: auto (bfloat16 where the processor has it, else float32), bfloat16 or float32",
        chosen_by="the processor",
    )
    runner: str = knob(
        "auto",
        "whose forward pass a step is: lean (Llama, Mistral, Qwen2 and Qwen3), transformers, or auto (lean where the "
        "model fits exactly)",
        cost="transformers: slower steps, the modules of transformers themselves",
        chosen_by="bench overhead: lean_vs_transformers_decode_512",
    )
    weights: str = knob(
        "dense",
        "the form in which weights stay in memory: dense (tensors in dtype), auto (the codes of a quantised GGUF file "
        "as they are, else dense), or packed as bf16, int8 or int4 for the lean runner",
        cost="dense: more memory, and more to read for every token; int4: answers differ a little; packing takes a "
        "while at the start",
        chosen_by="off unless asked for: packed weights answer a little otherwise; bench linear: ppl_ratio_int4",
    )
    memory: str = knob(
        "auto",
        "hard limit of the cache over K, V, scales, tables and copies; auto: 0.8 x what weights and workspace leave",
        unit="bytes",
        cost="less memory: fewer cached prefixes, more waiting",
        chosen_by="a limit, for safety",
    )


@dataclass(frozen=True)
class Knob:
    """One setting: its home (the config that has it) and what its field says about itself."""

    name: str
    home: type[StartConfig] | type[CacheConfig] | type[EngineConfig] | type[TierConfig]
    kind: str
    default: Any
    about: Mapping[str, str]

    @property
    def unit(self) -> str:
        return self.about.get("unit", "")

    def read(self, written: object, *, is_text: bool = False) -> Any:
        """The value that was written, such as "8GB" or "32k"; `is_text`: where all values are text, such as "1.5".

        Raises: ConfigError for what the config it belongs to does not allow.
        """
        if self.name == "memory":
            return written if written == "auto" else parse_bytes(written)  # type: ignore[arg-type]  # it refuses others
        value = written
        if isinstance(written, str) and self.kind == "int" and self.unit in ("bytes", "tokens"):
            value = (parse_bytes if self.unit == "bytes" else parse_tokens)(written)
        elif isinstance(written, str) and is_text and self.kind != "str":
            value = _number(self.name, written, int if self.kind == "int" else float)
        if self.home is StartConfig:
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{self.name}={value!r} is not allowed; allowed: a text")
            return value
        self.home.load({self.name: value})  # type: ignore[union-attr]  # not a StartConfig
        return value


@cache
def knobs() -> Mapping[str, Knob]:
    """Every knob by name, in the order in which they are shown."""
    homes: tuple[Any, ...] = (StartConfig, CacheConfig, EngineConfig, TierConfig)
    fields = [(home, field) for home in homes for field in dataclasses.fields(home) if field.name != "memory_bytes"]
    return {f.name: Knob(f.name, home, str(f.type), f.default, f.metadata) for home, f in fields}


@dataclass(frozen=True)
class Source:
    """One place that sets knobs. `places`: where exactly each of its keys stands, for messages and for people."""

    name: str
    values: Mapping[str, object]
    places: Mapping[str, str]
    is_text: bool = False


@dataclass(frozen=True)
class Settings:
    """The value of every knob, and the place it came from."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    @property
    def model(self) -> str | None:
        """What to load; None where nothing names a model."""
        return self.values["model"] or None

    @property
    def cache_values(self) -> dict[str, Any]:
        """The fields of `CacheConfig`, without the memory limit."""
        return {name: self.values[name] for name, each in knobs().items() if each.home is CacheConfig}

    @property
    def engine_values(self) -> dict[str, Any]:
        """The fields of `EngineConfig`."""
        return {name: self.values[name] for name, each in knobs().items() if each.home is EngineConfig}

    @property
    def tier_values(self) -> dict[str, Any]:
        """The fields of `TierConfig`."""
        return {name: self.values[name] for name, each in knobs().items() if each.home is TierConfig}

    @property
    def memory(self) -> str | int:
        """The cache's limit in bytes, or "auto"."""
        value: str | int = self.values["memory"]
        return value

    @property
    def llm_options(self) -> dict[str, Any]:
        """The keyword arguments of `LLM`."""
        return {name: value for name, value in self.values.items() if name != "model"}


def resolve(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    user_file: Path | None = None,
) -> Settings:
    """The settings in force. `flags`: what the command line says, None where it says nothing.

    `folder` (the current one) and `user_file` (the user's) are looked into for files; a missing one says nothing.
    Raises: ConfigError with the place of what is wrong.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    sources = [Source("flags", given, {name: f"--{name.replace('_', '-')}" for name in given}, is_text=True)]
    sources.append(environment(environ))
    sources += [read_file(path) for path in files(folder, user_file)]
    return merge(sources)


def merge(sources: Sequence[Source]) -> Settings:
    """The first source that sets a knob wins; defaults come last. Every value is checked, also those that lose.

    Raises: ConfigError.
    """
    values = {name: each.default for name, each in knobs().items()}
    origins = dict.fromkeys(values, DEFAULT)
    for source in reversed(sources):
        for name, written in source.values.items():
            place = source.places[name]
            if name not in knobs():
                raise ConfigError(f"{place}: unknown setting {name!r}; {_near(name, knobs())}")
            try:
                values[name] = knobs()[name].read(written, is_text=source.is_text)
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
            origins[name] = place
    return Settings(values, origins)


def environment(environ: Mapping[str, str]) -> Source:
    """The knobs that `KTRANSFORMER_*` variables set; an empty variable sets nothing. Raises ConfigError."""
    values, places = {}, {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in knobs() or variable != variable.upper():
            known = [PREFIX + each.upper() for each in knobs()] + sorted(OTHER_VARIABLES)
            raise ConfigError(f"{variable}: unknown environment variable; {_near(variable, known)}")
        values[name], places[name] = text, variable
    return Source("environment", values, places, is_text=True)


def user_file() -> Path:
    """The user's TOML, there or not."""
    import platformdirs

    return Path(platformdirs.user_config_dir("ktransformer2", appauthor=False)) / USER_FILE


def project_file(folder: Path | None = None) -> Path | None:
    """The project's TOML of `folder`, the current one by default. A `pyproject.toml` counts where it has our table."""
    folder = folder or Path.cwd()
    if (own := folder / PROJECT_FILE).is_file():
        return own
    shared = folder / PYPROJECT
    return shared if shared.is_file() and _our_table(shared, _text(shared)) is not None else None


def files(folder: Path | None = None, user: Path | None = None) -> list[Path]:
    """The TOML files that are there, the one that wins first."""
    own = user or user_file()
    found = [project_file(folder), own if own.is_file() else None]
    return [path for path in found if path is not None]


def read_file(path: Path) -> Source:
    """What a TOML file sets. Raises ConfigError where it cannot be read or is no TOML; keys are checked by `merge`."""
    text = _text(path)
    if path.name != PYPROJECT:
        values, begin = _parsed(path, text), 0
    else:
        values = _our_table(path, text) or {}
        found = _OUR_TABLE.search(text)
        begin = found.start() if found else 0
    return Source(str(path), values, {key: f"{path}{_line(text, begin, key)}" for key in values})


def _our_table(path: Path, text: str) -> dict[str, Any] | None:
    """What `pyproject.toml` says to us; None: nothing. Raises ConfigError, for a table that nearly has our name too."""
    tools = _parsed(path, text).get("tool", {})
    for name in tools if isinstance(tools, dict) else ():
        if name != _TOOL and _NEAR_TOOL.fullmatch(name):
            raise ConfigError(
                f"{path}{_line(text, 0, f'tool.{name}')}: nobody reads [tool.{name}]; it is [tool.{_TOOL}]"
            )
    if not isinstance(tools, dict) or _TOOL not in tools:
        return None
    ours = tools[_TOOL]
    if not isinstance(ours, dict):
        raise ConfigError(f"{path}: tool.{_TOOL}={str(ours)[:60]!r} is not allowed; allowed: a table of settings")
    return ours


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is no TOML ({error})") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _line(text: str, begin: int, key: str) -> str:
    """`:7` where the key begins a line; nothing where it is written in another way."""
    found = re.compile(
        rf"^[ \t]*\[?(?:[^=#\n]*\.)?[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*[=.\]]", re.MULTILINE
    ).search(text, begin)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else "`ktransformer config show` lists what there is"


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError as error:
        what = "whole number" if kind is int else "number"
        raise ConfigError(f"{name}={text[:60]!r} is not allowed; allowed: a {what}") from error
