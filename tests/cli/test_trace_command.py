"""`ktransformer trace record`: a real run, written as numbers, that the simulator reads."""

from __future__ import annotations

from pathlib import Path

from ktransformer2.bench.policy_trace import read_block_trace
from ktransformer2.cli import guard
from tests.cli.invoking import failed, invoke


def test_a_recorded_run_replays(tiny_model_folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "run.jsonl"
    prompts.write_text(f"{'secret ' * 20}a\n\n{'secret ' * 20}b\n", encoding="utf-8")
    result = invoke(
        *("trace", "record", prompts, "--out", out, "--model", tiny_model_folder),
        *("--max-new-tokens", "2", "--memory", "64MB"),
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"2 requests in {out}\n"
    first, second = read_block_trace(out).requests
    assert first.ids[:2] == second.ids[:2]
    assert first.ids != second.ids
    assert "secret" not in out.read_text()


def test_no_prompt_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n \n", encoding="utf-8")
    out = tmp_path / "run.jsonl"
    message = failed(invoke("trace", "record", prompts, "--out", out, "--model", "x"), guard.EXIT_USAGE)
    assert "holds no prompt" in message
    assert not out.exists()
