"""run, demo and bench as a person meets them: what goes where, which exit code, and no traceback."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ktransformer2.cli import guard
from ktransformer2.cli.commands import app
from ktransformer2.cli.run import prompt_text
from tests.cli.invoking import CLI, failed, invoke


def test_run_writes_the_answer_to_stdout_and_its_cost_to_stderr(tiny_model_folder: Path) -> None:
    result = invoke("run", tiny_model_folder, "--prompt", "Hello", "--max-new-tokens", "5", "--memory", "64MB")
    assert result.exit_code == 0, result.stderr
    assert "tokens in" not in result.stdout
    assert "weights ..." in result.stderr
    assert "ready in" in result.stderr
    prompt = "user: Hello\nassistant: "  # one token a byte
    assert f"{len(prompt)} tokens in (0 cached) | 5 out | first token" in result.stderr
    assert "KV 0 B" not in result.stderr


def test_run_json_is_one_object_with_the_same_answer(tiny_model_folder: Path) -> None:
    common = ("run", tiny_model_folder, "--max-new-tokens", "6", "--memory", "64MB", "--raw")
    plain = invoke(*common, "--prompt", "Hello")
    parsed = json.loads(invoke(*common, "--json", stdin="Hello\n").stdout)
    assert parsed["text"] + "\n" == plain.stdout
    assert parsed["prompt_tokens"] == 5
    assert parsed["new_tokens"] == 6
    assert parsed["cached_tokens"] == 0
    assert parsed["finish_reason"] == "length"
    assert parsed["ttft_s"] > 0


def test_both_runners_answer_alike_and_the_result_names_the_one(tiny_model_folder: Path) -> None:
    common = ("run", tiny_model_folder, "--max-new-tokens", "6", "--memory", "64MB", "--raw", "--json", "-p", "Hello")
    found = [json.loads(invoke(*common, *more).stdout) for more in ((), ("--runner", "transformers"))]
    assert [each["runner"] for each in found] == ["lean", "transformers"]
    assert found[0]["text"] == found[1]["text"]


def test_run_reads_a_file_before_the_prompt(tiny_model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc\n", encoding="utf-8")
    result = invoke(
        *("run", tiny_model_folder, "--raw", "--file", text, "--prompt", "de", "--json"),
        *("--max-new-tokens", "1", "--memory", "64MB"),
    )
    assert json.loads(result.stdout)["prompt_tokens"] == len("abc\n\nde")


def test_the_result_names_the_form_of_the_weights(tiny_model_folder: Path) -> None:
    common = ("run", tiny_model_folder, "-p", "abc", "--json", "--max-new-tokens", "4", "--memory", "64MB")
    assert json.loads(invoke(*common, "--weights", "int8").stdout)["weights"] == "int8"
    planned = invoke("plan", tiny_model_folder, "--weights", "int8", "--memory", "64MB", "--dtype", "float32")
    assert "float32 over int8 weights." in planned.stdout
    refused = invoke(*common, "--weights", "int4", "--runner", "transformers")
    assert "weights='int4' is for the lean runner" in failed(refused, guard.EXIT_USAGE)


def test_run_refuses_what_is_no_text(tiny_model_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"\xff\xfe\xff")
    assert "no UTF-8 text" in failed(invoke("run", tiny_model_folder, "--file", broken), guard.EXIT_FAILED)


@pytest.mark.parametrize("arguments", [(), ("--raw",), ("--prompt", ""), ("--prompt", " \n"), ("--raw", "-p", "")])
def test_an_empty_prompt_is_refused_before_weights_are_read(
    tiny_model_folder: Path, arguments: tuple[str, ...]
) -> None:
    result = invoke("run", tiny_model_folder, *arguments)
    assert "prompt is empty" in failed(result, guard.EXIT_USAGE)
    assert "weights" not in result.stderr


@pytest.mark.parametrize(("arguments", "place"), [(("-p", os.fsdecode(b"ab\xff")), "the prompt"), ((), "stdin")])
def test_bytes_that_are_no_text_are_refused_before_weights_are_read(
    tiny_model_folder: Path, arguments: tuple[str, ...], place: str
) -> None:
    result = CliRunner().invoke(app, ["run", str(tiny_model_folder), *arguments], input=b"ab\xff")
    assert failed(result, guard.EXIT_FAILED) == f"error: {place} is no UTF-8 text"
    assert "weights" not in result.stderr


def test_a_text_that_cannot_be_read_is_one_line(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x", encoding="utf-8")

    read_text = Path.read_text

    def refuse(path: Path, *arguments: Any, **options: Any) -> str:
        if path == text:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    message = failed(invoke("run", tiny_model_folder, "--file", text, "-p", "x"), guard.EXIT_FAILED)
    assert "text.txt cannot be read" in message


def test_run_on_a_terminal_without_a_prompt_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(typer.Exit) as stop:
        prompt_text(None, None)
    assert stop.value.exit_code == guard.EXIT_USAGE


def test_unknown_model() -> None:
    assert "/no/such/model" in failed(invoke("run", "/no/such/model", "-p", "x"), guard.EXIT_FAILED)


def test_memory_that_is_too_small_does_not_fit(tiny_model_folder: Path) -> None:
    result = invoke("run", tiny_model_folder, "-p", "x" * 4000, "--memory", "1MB", "--max-new-tokens", "5000")
    message = failed(result, guard.EXIT_DOES_NOT_FIT)
    assert "5000" in message
    assert "longest" not in message  # there is none: the reserve alone is too much
    shorter = invoke("run", tiny_model_folder, "-p", "x" * 4000, "--memory", "1MB", "--max-new-tokens", "100")
    assert "The longest prompt that fits with this reserve is 1179 tokens." in failed(shorter, guard.EXIT_DOES_NOT_FIT)


def test_prompt_longer_than_the_model_does_not_fit(tiny_model_folder: Path) -> None:
    result = invoke("run", tiny_model_folder, "-p", "x", "--memory", "64MB", "--max-new-tokens", "200000")
    assert "131072" in failed(result, guard.EXIT_DOES_NOT_FIT)


def test_settings_that_are_wrong_are_usage_errors(tiny_model_folder: Path) -> None:
    assert "'lots' is not understood" in failed(
        invoke("run", tiny_model_folder, "-p", "x", "--memory", "lots"), guard.EXIT_USAGE
    )
    message = failed(invoke("run", tiny_model_folder, "-p", "x", "--max-new-tokens", "0"), guard.EXIT_USAGE)
    assert message == "error: --max-new-tokens: max_new_tokens=0 is not allowed; allowed: 1 or more"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv", "int9"), "--kv: 'int9' is not one of 'auto', 'full', 'int8'; did you mean 'int8'?"),
        (("--max-new-token", "3"), "no such option '--max-new-token'; did you mean '--max-new-tokens'?"),
        (("--no-such-flag",), "no such option: --no-such-flag; `ktransformer run --help` lists what there is"),
        (("--top-p", "0"), "--top-p: top_p=0.0 is not allowed; allowed: above 0 to 1"),
        (("--top-p", "2"), "--top-p: top_p=2.0 is not allowed; allowed: above 0 to 1"),
        (("--temperature", "-1"), "--temperature: temperature=-1.0 is not allowed; allowed: 0 or more"),
        (
            ("--repetition-penalty", "0"),
            "--repetition-penalty: repetition_penalty=0.0 is not allowed; allowed: above 0",
        ),
    ],
)
@pytest.mark.parametrize("command", [("run", "-p", "x"), ("chat",)], ids=["run", "chat"])
def test_a_wrong_flag_is_one_line_before_a_library_is_loaded(
    command: tuple[str, ...], arguments: tuple[str, ...], message: str
) -> None:
    result = invoke(command[0], "/no/such/model", *command[1:], *arguments)
    assert failed(result, guard.EXIT_USAGE) == "error: " + message.replace(
        "ktransformer run", f"ktransformer {command[0]}"
    )
    assert "libraries" not in result.stderr


def test_what_fits_is_told_in_flags(tiny_model_folder: Path) -> None:
    message = failed(invoke("run", tiny_model_folder, "-p", "x", "--memory", "10kB"), guard.EXIT_DOES_NOT_FIT)
    assert "is 0 tokens" not in message
    assert "Raise --memory, lower --max-new-tokens" in message


@pytest.mark.parametrize("entry", ["main", "monitor_main"])
def test_ctrl_c_while_commands_are_imported_is_130_without_a_traceback(entry: str) -> None:
    script = (
        "import os, signal, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.meta_path.insert(0, Stop())\nfrom ktransformer2 import cli\ncli.{entry}()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (guard.EXIT_INTERRUPTED, "", "")


def test_a_second_ctrl_c_is_130_without_a_traceback() -> None:
    script = (
        "import os, signal, typer\nfrom ktransformer2.cli import guard\n"
        "app = typer.Typer()\n"
        "def told(*_, **__):\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "guard.typer.echo = told\n"  # while the first one is told of
        "@app.command()\n@guard.reported\ndef wait() -> None:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "guard.start(app)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (guard.EXIT_INTERRUPTED, "", "")


def test_ctrl_c_while_python_ends_draws_no_traceback() -> None:
    script = (
        "import atexit, os, signal, typer\nfrom ktransformer2.cli import guard\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "app = typer.Typer()\n@app.command()\ndef nothing() -> None:\n    pass\n"
        "guard.start(app)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")  # which a shell shows as 130


def test_ctrl_c_is_130_without_a_traceback(tiny_model_folder: Path) -> None:
    command = [*CLI, "run", str(tiny_model_folder), "-p", "xxx", "--memory", "256MB", "--max-new-tokens", "100k"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == guard.EXIT_INTERRUPTED
    assert b"Traceback" not in errors
    closing, last = errors.rstrip().splitlines()[-2:]
    assert closing.startswith(b"21 tokens in (0 cached) | ")  # what there is was printed, and what it cost
    assert last == b"error: interrupted"


def in_a_shell(script: str, folder: Path, **environment: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a shell line in which `$RUN` answers a short prompt."""
    run = [*CLI, "run", str(folder), "-p", "x", "--memory", "64MB", "--max-new-tokens", "50"]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script.replace("$RUN", shlex.join(run))],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_reader_that_leaves_ends_the_answer_quietly(tiny_model_folder: Path) -> None:
    code, answer, errors = in_a_shell("$RUN | head -c 1", tiny_model_folder)
    assert (code, len(answer)) == (guard.EXIT_FAILED, 1)
    assert "rror" not in errors
    assert "Traceback" not in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_an_answer_that_cannot_be_written_is_one_line(tiny_model_folder: Path) -> None:
    code, _, errors = in_a_shell("$RUN > /dev/full", tiny_model_folder)
    assert code == guard.EXIT_FAILED
    assert errors.splitlines()[-1] == "error: stdout cannot be written ([Errno 28] No space left on device)"
    assert "Traceback" not in errors


def test_closed_streams_and_a_narrow_encoding_are_no_faults(tiny_model_folder: Path) -> None:
    assert in_a_shell("$RUN >&- <&-", tiny_model_folder)[:2] == (0, "")
    code, answer, _ = in_a_shell("$RUN", tiny_model_folder, PYTHONIOENCODING="ascii")
    assert code == 0
    assert answer.isascii()


def test_a_cache_directory_that_cannot_be_made_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path / "file" / "below"))
    message = failed(invoke("demo", "--source", "wheel", "--png", tmp_path / "p.png"), guard.EXIT_USAGE)
    assert "KTRANSFORMER_CACHE" in message


@pytest.mark.parametrize("command", [("demo", "--source", "random", "--png"), ("bench", "memory", "--quick", "--json")])
def test_a_result_that_has_no_place_is_refused_before_anything_runs(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "below", tmp_path):
        result = invoke(*command, place)
        assert f"{place} cannot be written" in failed(result, guard.EXIT_USAGE)
        assert f"name another place with {command[-1]}" in result.stderr
        assert "libraries" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_bench_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ktransformer2.bench import run as bench_run

    calls: list[tuple[str, dict[str, Any]]] = []

    def main(name: str, **options: Any) -> int:
        calls.append((name, options))
        return 5

    monkeypatch.setattr(bench_run, "main", main)
    options_of_a_run = ("--quick", "--check", "--prompts", "3", "--max-tokens", "32k")
    result = invoke("bench", "fidelity", "--json", tmp_path / "f.json", *options_of_a_run)
    assert result.exit_code == 5
    [(name, options)] = calls
    assert name == "fidelity"
    assert options["json_path"] == tmp_path / "f.json"
    assert not (tmp_path / "f.json").exists()
    assert options["quick"]
    assert options["check"]
    assert options["options"].num_prompts == 3
    assert options["options"].max_tokens == 32 * 1024
    for wrong in ("0", "many"):
        assert failed(invoke("bench", "fidelity", "--max-tokens", wrong), guard.EXIT_USAGE).startswith("error: --max-")


@pytest.mark.parametrize(("bound", "code"), [("100", 0), ("1e-9", 5)])
def test_a_bench_that_misses_a_target_exits_with_5(bound: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target of a part that needs no model, moved to where it surely holds and where it surely does not."""
    from ktransformer2.bench import targets

    moved = [
        dataclasses.replace(target, bound=float(bound)) if target.key.startswith("engine_overhead") else target
        for target in targets.TARGETS
    ]
    monkeypatch.setattr(targets, "TARGETS", tuple(moved))
    measured = ("bench", "overhead", "--part", "engine", "--quick")
    result = invoke(*measured, "--check")
    assert result.exit_code == code, result.stderr
    assert f"<= {float(bound):g}" in result.stdout
    assert "engine_overhead_ms_b1" in result.stdout
    if code:
        assert invoke(*measured).exit_code == 0  # only --check asks


def test_unknown_bench_is_a_usage_error() -> None:
    assert invoke("bench", "speed").exit_code == guard.EXIT_USAGE


def test_demo_on_a_random_model(tmp_path: Path) -> None:
    png = tmp_path / "plot.png"
    arguments = ("--source", "random", "--context", "600", "--max-new-tokens", "8", "--memory", "64MB")
    result = invoke("demo", *arguments, "--json", "--png", png)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    first, second = found["answers"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > 0.5 * second["prompt_tokens"]
    assert second["cached_tokens"] % 64 == 0
    assert first["prompt_tokens"] <= 600 - 8
    moments = [sample["moment"] for sample in found["samples"] if sample["moment"]]
    assert moments == ["start", "half read", "contract read", "answer 1", "answer 2", "clear()"]
    last = found["samples"][-1]
    assert last["used_bytes"] == 0
    assert last["held_bytes"] < 0.1 * found["peak_bytes"]
    assert found["peak_bytes"] < found["static_bytes"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_demo_shows_answers_table_plot_and_sentences(tmp_path: Path) -> None:
    arguments = ("--source", "random", "--context", "600", "--max-new-tokens", "4", "--memory", "64MB")
    result = invoke("demo", *arguments, "--png", tmp_path / "plot.png")
    assert result.exit_code == 0, result.stderr
    for words in ("Question 1:", "Question 2:", "Memory of the cache", "contract read", "clear()", "Reuse: ", " warm"):
        assert words in result.stdout
    assert "a small random model" in result.stderr


def test_demo_without_room_for_the_text() -> None:
    result = invoke("demo", "--source", "random", "--context", "100", "--memory", "64MB")
    assert "raise --context" in failed(result, guard.EXIT_USAGE)
