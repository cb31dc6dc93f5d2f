"""The public names: which there are, that docs/api.md has all of them, and how a name takes its leave."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from transformers import Cache

import ktransformer2
from ktransformer2 import errors
from ktransformer2.integrations.attach import Attachment
from tests.api_page import MARK, SHOWN, generated, is_shown

EXPORTED = [
    "LLM",
    "CacheConfig",
    "DynamicKVCache",
    "EngineConfig",
    "KTransformerError",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "TierConfig",
    "__version__",
    "attach",
]


@pytest.fixture(scope="module")
def page(repository: Path) -> Path:
    return repository / "docs" / "api.md"


def test_exactly_these_names_are_exported() -> None:
    assert ktransformer2.__all__ == EXPORTED
    assert dir(ktransformer2) == sorted(EXPORTED)


def test_the_page_says_what_the_sources_say(page: Path) -> None:
    written, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{page} has lost the line {MARK!r}"
    text = f"{written}{MARK}\n{generated()}"
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text, f"{page} is out of date; UPDATE_SNAPSHOTS=1 writes it anew"


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_has_its_place_on_the_page(name: str, page: Path) -> None:
    assert re.search(rf"(?m)^## {name}$|^class {name}\(|`ktransformer2\.{name}`", page.read_text(encoding="utf-8"))


def public_calls() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Every function of the page with the text that may explain its parameters: its own, its class's, its siblings'."""
    for thing, members in SHOWN.items():
        if inspect.isfunction(thing):
            yield thing.__name__, thing, inspect.getdoc(thing) or ""
        elif not dataclasses.is_dataclass(thing):
            calls = {name: each for name, each in vars(thing).items() if inspect.isfunction(each)}
            calls = {name: each for name, each in calls.items() if is_shown(name, members)}
            text = "\n".join(inspect.getdoc(each) or "" for each in (thing, *calls.values()))
            for name, call in calls.items():
                if name == "__init__" or not hasattr(Cache, name):  # transformers says what its own contract takes
                    yield f"{thing.__name__}.{name}", call, text


def test_every_parameter_is_explained() -> None:
    calls = list(public_calls())
    assert {"attach", "LLM.__init__", "LLM.stream_chat", "DynamicKVCache.__init__"} <= {name for name, _, _ in calls}
    assert [
        f"{name}({parameter})"
        for name, call, text in calls
        for parameter in inspect.signature(call).parameters
        if parameter != "self" and not re.search(rf"\b{parameter}\b", text)
    ] == []


@pytest.mark.parametrize("owner", [ktransformer2.LLM, Attachment])
def test_every_public_attribute_is_explained(owner: type, page: Path) -> None:
    named = re.findall(r"self\.([a-z]\w*)[^=\n]*=", inspect.getsource(owner).split("    def ")[1])
    text = page.read_text(encoding="utf-8").partition(MARK)[0]
    assert named
    assert [name for name in named if f"`{name}`" not in text] == []


def test_the_tree_of_errors_shows_every_error() -> None:
    tree = errors.__doc__ or ""
    found = [each for each in vars(errors).values() if inspect.isclass(each)]
    assert len(found) >= 14
    for each in found:
        assert issubclass(each, ktransformer2.KTransformerError)
        assert re.search(rf"\b{each.__name__}\b", tree), f"{each.__name__} is missing from the tree"


def test_an_old_name_works_for_one_release_and_says_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ktransformer2._RENAMED, "Model", ("LLM", "0.3.0"))
    with pytest.warns(DeprecationWarning, match=r"^ktransformer2\.Model is LLM now; 0\.3\.0 has only that$") as caught:
        assert ktransformer2.Model is ktransformer2.LLM
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        assert ktransformer2.LLM is not None


def test_no_old_name_outstays_its_release() -> None:
    now = Version(ktransformer2.__version__)
    assert [old for old, (_, end) in ktransformer2._RENAMED.items() if Version(end) <= now] == []
    assert {new for new, _ in ktransformer2._RENAMED.values()} <= set(EXPORTED)
