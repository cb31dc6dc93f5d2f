"""The generated half of docs/api.md: what the public names say of themselves, read from their sources.

A class is shown as its own source without what is private and without bodies, settings as a table of their metadata.
What the docstrings do not say, the page does not say.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Collection
from typing import Any

from transformers import Cache

import ktransformer2 as k
from ktransformer2 import errors
from ktransformer2.cache.advice import Advice, Pin
from ktransformer2.cache.explain import Explanation
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.cache.lower import LowerStats
from ktransformer2.cache.stats import CacheStats
from ktransformer2.cache.trace import TraceRecorder
from ktransformer2.engine.outputs import Completion, EngineStats, TokenLogprob, Usage
from ktransformer2.integrations.attach import Attachment, CallUsage
from ktransformer2.monitor import MetricsServer, serve_metrics
from tests.conftest import REPOSITORY

MARK = "<!-- From here on written by UPDATE_SNAPSHOTS=1 pytest tests/test_api.py, out of the docstrings. -->\n"
_ANSWERS = (k.RequestOutput, Completion, Usage, Explanation, TokenLogprob, k.StreamChunk, EngineStats)
# What is shown of each name; None: all that is public. Of the transformers cache, its contract and what is its own.
SHOWN: dict[Any, Collection[str] | None] = {
    k.LLM: None,
    k.SamplingParams: {field.name for field in dataclasses.fields(k.SamplingParams)},
    **dict.fromkeys(_ANSWERS),
    k.DynamicKVCache: {*dir(Cache), "kv", "is_paged"} - {"__repr__", "__reduce__"},
    k.attach: None,
    Attachment: {*vars(Attachment)} - {"__init__"},
    CallUsage: None,
    KVCache: {"stats", "clear", "explain", "tier_stats"},
    Advice: {*vars(Advice)} - {"__init__", "end"},
    Pin: {"num_tokens"},
    TraceRecorder: {"__init__"},
    CacheStats: None,
    LowerStats: None,
    serve_metrics: None,
    MetricsServer: {"close"},
}
_CUT = "\n# 8< -\n"


def generated() -> str:
    """Everything below `MARK`."""
    shown = {thing.__name__: _outline(thing, members) for thing, members in SHOWN.items()}
    settings = {config.__name__: _settings(config) for config in (k.CacheConfig, k.EngineConfig, k.TierConfig)}
    blocks = _formatted([*shown.values(), _outline(errors, None)])
    sections = [f"## {name}\n\n{_fenced(block)}" for name, block in zip(shown, blocks, strict=False)]
    sections += [f"## {name}\n\n{table}" for name, table in settings.items()]
    sections.append(f"## Errors\n\nImported from `ktransformer2.errors`.\n\n{_fenced(blocks[-1])}")
    return "\n".join(sections)


def _outline(thing: Any, members: Collection[str] | None) -> str:
    """The source of a class, function or module, without bodies and private names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    _strip(tree, members)
    return ast.unparse(tree)


def _strip(node: ast.Module | ast.ClassDef, members: Collection[str] | None) -> None:
    kept: list[ast.stmt] = []
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and (isinstance(node, ast.Module) or is_shown(child.name, members)):
            child.body = child.body[:1] if ast.get_docstring(child) else [ast.Expr(ast.Constant(...))]
        elif isinstance(child, ast.ClassDef):
            _strip(child, members)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            if not is_shown(child.target.id, members):
                continue
        elif child is not node.body[0] or ast.get_docstring(node) is None:
            continue
        kept.append(child)
    node.body = kept


def is_shown(name: str, members: Collection[str] | None) -> bool:
    """Whether the page shows the member `name` of a class of which it shows `members`."""
    public = name == "__init__" or not name.startswith("_")
    return public and (members is None or name in members)


def _formatted(blocks: list[str]) -> list[str]:
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "api.pyi", "-"]
    done = subprocess.run(command, cwd=REPOSITORY, input=_CUT.join(blocks), capture_output=True, text=True, check=True)
    return [block.strip() for block in done.stdout.split(_CUT.strip())]


def _fenced(code: str) -> str:
    return f"```pyi\n{code}\n```\n"


def _settings(config: type[Any]) -> str:
    """Every knob as a row."""
    lines = [f"{inspect.getdoc(config)}\n", "| name | default | unit | effect | cost | what chose the default |"]
    lines.append("|---|---|---|---|---|---|")
    for field in dataclasses.fields(config):
        about = field.metadata
        words = " | ".join((about["effect"], about.get("cost", ""), about["chosen_by"]))
        lines.append(f"| `{field.name}` | `{field.default!r}` | {about.get('unit', '')} | {words} |")
    return "\n".join(lines) + "\n"
