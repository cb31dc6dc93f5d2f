"""What every test shares: the shared data, and the rule that no test is skipped without a word.

A skip that `tests/allowed_skips.txt` does not name with its reason fails the run.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Generator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
_skips = pytest.StashKey[list[tuple[str, str]]]()


def allowed_skips(text: str) -> list[tuple[str, str]]:
    """(pattern of test ids, pattern of reasons) of each line; `#` begins a comment.

    Raises ValueError for a line without a reason.
    """
    rules = []
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        test, bar, reason = (part.strip() for part in line.partition(" | "))
        if not bar or not reason.strip("*"):
            raise ValueError(f"allowed_skips.txt: {line!r} names no reason; write: test id pattern | reason pattern")
        rules.append((test, reason))
    return rules


def unnamed_skips(skips: list[tuple[str, str]], rules: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The (test id, reason) pairs that no rule names."""
    return [
        (test, reason)
        for test, reason in skips
        if not any(fnmatch.fnmatchcase(test, t) and fnmatch.fnmatchcase(reason, r) for t, r in rules)
    ]


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


class SkipAccount:
    """Remembers every skip of a run, and turns a green run red for those that nobody allowed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.skips: list[tuple[str, str]] = []

    def unnamed(self) -> list[tuple[str, str]]:
        return unnamed_skips(self.skips, allowed_skips(ALLOWED_SKIPS.read_text(encoding="utf-8")))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skips.append((report.nodeid, _skip_reason(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skips.append((report.nodeid, _skip_reason(report)))

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        if session.exitstatus == pytest.ExitCode.OK and self.unnamed():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, reason in self.unnamed():
            terminalreporter.write_line(f"SKIP NOT ALLOWED {test}: {reason} (see {ALLOWED_SKIPS.name})", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipAccount(config), "skip-account")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def bench_data() -> Path:
    """The small data files that lie in the repository."""
    return REPOSITORY / "benchmarks" / "data"


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a tokenizer of bytes and a chat template, saved as a model folder."""
    from ktransformer2.models.demo import random_model

    folder = tmp_path_factory.mktemp("tiny-model")
    made = random_model("float32")
    made.model.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The larger data set beside the checkout: KTRANSFORMER_DATA, else ../shared/data.

    Where it is missing the test is skipped; with KTRANSFORMER_REQUIRE_DATA=1 that is an error.
    """
    place = Path(os.environ.get("KTRANSFORMER_DATA") or REPOSITORY.parent / "shared" / "data")
    if not place.is_dir():
        word = f"shared data is missing: {place}"
        if os.environ.get("KTRANSFORMER_REQUIRE_DATA") == "1":
            pytest.fail(word)
        pytest.skip(word)
    return place
