"""Every example runs, on a small random model, and prints what it promises."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROMISED = {
    "batch.py": r"(?s)^\s+0 of \d+ tokens were in the cache$.*^\s+[1-9]\d+ of \d+ tokens were in the cache$",
    "chat_turns.py": r"\[\d+ tokens in, [1-9]\d* of them cached\]",
    "five_lines.py": r"(?s).+",
    "memory_follows_text.py": r"(?s)before.*answered.*cleared, [0-9.]+ MB were given back",
}


def test_every_example_is_listed() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(PROMISED)


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_example_runs(
    name: str, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KTRANSFORMER_MODEL", str(tiny_model_folder))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert re.search(PROMISED[name], shown, re.MULTILINE), shown


def test_the_readme_shows_the_five_lines(repository: Path) -> None:
    shown = re.search(r"```python\n(.*?)```", (repository / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    example = (EXAMPLES / "five_lines.py").read_text(encoding="utf-8")
    named = example.replace('os.environ.get("KTRANSFORMER_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")', "MODEL")
    wanted = shown[1].replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', "MODEL")
    assert [line for line in wanted.splitlines() if line not in named.splitlines()] == []
