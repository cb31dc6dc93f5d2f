"""Every example runs, on a small random model, and prints what it promises."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

MODEL = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROMISED = {
    "attach.py": r"(?s)^0 of \d+ tokens cached, .*^[1-9]\d+ of \d+ tokens cached, first token after [0-9.]+ s$",
    "batch.py": r"(?s)^\s+0 of \d+ tokens were in the cache$.*^\s+[1-9]\d+ of \d+ tokens were in the cache$",
    "beams.py": r"^4 beams of \d{4} tokens in [12]\d blocks; apart they would take 68$",
    "chat_turns.py": r"\[\d+ tokens in, [1-9]\d* of them cached\]",
    "drop_in.py": r"^1091 tokens in 18 blocks of [0-9.]+ MB$",
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


def shown(example: Path) -> str:
    """An example as a page shows it: with the model's name written out, and without the words on top."""
    code = re.sub(r"\Aimport os\n\n?", "", example.read_text(encoding="utf-8").partition('"""\n\n')[2])
    return code.replace(f'os.environ.get("KTRANSFORMER_MODEL", {MODEL})', MODEL)


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_shows_examples_from_their_first_line_on(page: str, repository: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repository / page).read_text(encoding="utf-8"), re.DOTALL)
    examples = [shown(path) for path in sorted(EXAMPLES.glob("*.py"))]
    assert [block for block in blocks if not any(example.startswith(block) for example in examples)] == []
    assert any(block.startswith("from ktransformer2 import LLM, SamplingParams") for block in blocks)
