"""`ktransformer-monitor` and `ktransformer cache`: what people see of a running cache."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ktransformer2.cli import guard, looking, monitor, monitor_main
from ktransformer2.cli.looking import Look
from ktransformer2.errors import ConfigError
from ktransformer2.monitor import MetricsServer, mock, serve_metrics
from ktransformer2.monitor.views import VIEWS
from tests.cache.factories import make_cache, start
from tests.cli.invoking import assert_as_before, failed, invoke

TEXT = [(i * i + i // 7) % 31 for i in range(200)]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(monitor.app, [str(word) for word in arguments], env={"COLUMNS": "100"})


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two looks, two seconds apart."""
    path = tmp_path / "looks.jsonl"
    for tick in range(2):
        looking.add_to(path, Look("http://cache.example", 1_750_000_000.0 + 2 * tick, mock.answer(tick)))
    return path


@pytest.fixture
def served() -> Iterator[MetricsServer]:
    """A cache that has read one text, whose owner comes by all the time."""
    ready, done, found = threading.Event(), threading.Event(), []

    def own() -> None:
        cache = make_cache(kv="int8")
        table = start(cache, TEXT)
        assert table is not None
        cache.release(table)
        cache.maintain()
        found.append(cache)
        ready.set()
        while not done.wait(0.005):
            cache.maintain()
        cache.close()

    owner = threading.Thread(target=own)
    owner.start()
    assert ready.wait(60)
    with serve_metrics(found[0], 0, model_name="tiny") as server:
        yield server
    done.set()
    owner.join()


# --- ktransformer-monitor


@pytest.mark.parametrize("name", VIEWS)
def test_what_each_metric_shows(name: str, recording: Path) -> None:
    result = run("--metric", name, "--replay", recording)
    assert result.exit_code == 0
    first, second = result.stdout.split("\n\nhttp://cache.example")
    assert_as_before(f"monitor-{name}", first + "\n")
    assert second.startswith("  mock-135M  15:06:42 UTC")


def test_several_metrics_in_the_order_asked_for(recording: Path) -> None:
    words = run("--metric", "memory", "--metric", "health", "--replay", recording).stdout
    assert words.index("state ") < words.index("figure ")


def test_without_a_metric_it_is_cache_stats(recording: Path) -> None:
    assert run("--replay", recording).stdout == run("--metric", "cache_stats", "--replay", recording).stdout


def test_list_help_and_alerts() -> None:
    assert_as_before("monitor-list", run("--list").stdout)
    assert_as_before("monitor-help", run("--help").stdout)
    assert run("--alerts").stdout.startswith("# Prometheus alert rules")


def test_a_running_cache(served: MetricsServer) -> None:
    result = run("--url", served.url)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{served.url}  tiny  ")
    assert "hit rate                 -      >= 85 %  n/a    no repeats seen" in result.stdout


def test_nobody_there_is_exit_code_3() -> None:
    with serve_metrics(make_cache(), 0) as server:
        pass
    message = failed(run("--url", server.url), guard.EXIT_NOT_REACHABLE)
    assert "serve_metrics(llm.cache, port=8765)" in message


@pytest.mark.parametrize(("ratio", "code"), [(0.90, 0), (0.80, guard.EXIT_THRESHOLD)])
def test_check_is_exit_code_5_where_a_figure_is_red(tmp_path: Path, ratio: float, code: int) -> None:
    answer = mock.answer(0)
    answer["cache"] |= {"hit_tokens": int(ratio * 304_000)}
    path = tmp_path / "looks.jsonl"
    for _ in range(2):
        looking.add_to(path, Look("here", 0.0, answer))
    result = run("--check", "--json", "--replay", path)
    assert result.exit_code == code
    assert len(result.stdout.splitlines()) == (1 if code else 2)  # it leaves at the first red one
    assert run("--json", "--replay", path).exit_code == 0


def test_json_is_the_snapshot_with_its_health(recording: Path) -> None:
    lines = [json.loads(line) for line in run("--json", "--replay", recording).stdout.splitlines()]
    assert [line["cache"] for line in lines] == [mock.answer(tick)["cache"] for tick in range(2)]
    assert [figure["mark"] for figure in lines[0]["health"]] == ["RED", "ok", "ok", "n/a"]
    assert (lines[0]["source"], lines[0]["at"], lines[0]["model"]) == (
        "http://cache.example",
        1_750_000_000.0,
        mock.MODEL,
    )


def test_csv_has_one_header_and_the_same_columns_whatever_happened(recording: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(run("--csv", "--replay", recording).stdout)))
    assert [line["lookup_tokens"] for line in lines] == ["412000", "824000"]
    assert [line["evictions"] for line in lines] == ["881", "1095"]
    assert lines[0]["prefetch_accuracy"] == ""
    assert None not in lines[1]


def test_what_is_recorded_is_what_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "looks.jsonl"
    seen = run("--mock", "--json", "--record", path).stdout
    assert run("--json", "--replay", path).stdout == seen


def test_watch_looks_again_until_the_reader_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("ktransformer2.cli.looking.time.sleep", sleep)
    result = run("--mock", "--csv", "--watch", "2")
    assert result.exit_code == guard.EXIT_INTERRUPTED
    assert len(result.stdout.splitlines()) == 1 + 3
    assert slept == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--metric", "cachestats", "--mock"], "there is no metric 'cachestats'; did you mean 'cache_stats'?"),
        (["--metric", "dragons", "--mock"], "there is no metric 'dragons'; there are: cache_stats, health"),
        (["--json", "--csv", "--mock"], "give one of --json and --csv"),
        (["--mock", "--url", "http://x"], "one of --url, --replay and --mock"),
        (["--url", "x"], "'x' is no address"),
        (["--mock", "--record", "/no/such/folder/file"], "/no/such/folder/file cannot be written"),
    ],
)
def test_wrong_usage(arguments: list[str], why: str) -> None:
    assert why in failed(run(*arguments), guard.EXIT_USAGE)


def test_a_recording_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "looks.jsonl"
    path.write_text('{"source": "x"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"looks.jsonl:1 is no line that --record wrote"):
        list(looking.replayed(path))


def test_it_needs_no_torch_and_no_prometheus() -> None:
    script = (
        "import sys\nfrom ktransformer2.cli import monitor_main\nsys.argv = ['ktransformer-monitor', '--mock']\n"
        "try:\n    monitor_main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print(sorted({'torch', 'numpy', 'prometheus_client'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "hit rate" in done.stdout
    assert done.stderr == "[]\n"


def test_red_lines_are_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    look = Look("here", 0.0, mock.answer(0))
    for no_color, expected in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        show = looking.Shower(["health"], "text", clears=True)
        assert show(look)
        shown = capsys.readouterr().out
        assert shown.startswith("\x1b[2J\x1b[H")
        assert ("\x1b[31mhit rate" in shown) is expected
        assert "\x1b[31mgrowth" not in shown


# --- ktransformer cache


def test_cache_stats(served: MetricsServer) -> None:
    result = invoke("cache", "stats", "--url", served.url)
    assert result.exit_code == 0
    assert "fragmentation" in result.stdout
    found = json.loads(invoke("cache", "stats", "--url", served.url, "--json").stdout)
    assert found["cache"]["num_cached_blocks"] == 12


def test_cache_ls(served: MetricsServer) -> None:
    lines = invoke("cache", "ls", "--limit", "3", "--url", served.url).stdout.splitlines()
    assert lines[0].split() == [
        "group",
        "block",
        "id",
        "state",
        "rows",
        "num",
        "bytes",
        "references",
        "age",
        "s",
        "idle",
        "s",
    ]
    assert [line.split()[:4] for line in lines[1:4]] == [["0", str(block), "cached", "16"] for block in range(3)]
    assert lines[4:] == ["More: --start 3"]
    page = json.loads(invoke("cache", "ls", "--start", "3", "--url", served.url, "--json").stdout)
    assert [block["block_id"] for block in page["blocks"]] == list(range(3, 12))


def test_cache_explain(served: MetricsServer, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*TEXT[:70], 99, *TEXT[71:]]), encoding="utf-8")
    result = invoke("cache", "explain", prompt, "--url", served.url)
    assert result.stdout == ("64 of 200 tokens found; token 70 is the first that differs from what the cache holds\n")
    found = json.loads(invoke("cache", "explain", "-", "--url", served.url, "--json", stdin=json.dumps(TEXT)).stdout)
    assert (found["reason"], found["hit_tokens"]) == ("too short", 192)


def test_cache_explain_a_text(served: MetricsServer, tmp_path: Path, tiny_model_folder: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The tenant shall pay the rent by the third day of the month.", encoding="utf-8")
    arguments = ("cache", "explain", prompt, "--model", tiny_model_folder, "--url", served.url)
    assert "found; token 0 is the first that differs" in invoke(*arguments).stdout
    lines = invoke(*arguments, "--show-text").stdout.splitlines()
    assert lines[1:] == ["token 0 is 'T', after ''"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no json", "is no JSON list of token ids"),
        ("{}", "holds no list of token ids"),
        ("[]", "1 to 1,048,576 token ids"),
    ],
)
def test_cache_explain_of_what_is_no_prompt(served: MetricsServer, tmp_path: Path, content: str, why: str) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(content, encoding="utf-8")
    assert why in failed(invoke("cache", "explain", prompt, "--url", served.url), guard.EXIT_USAGE)


def test_cache_explain_shows_text_with_a_tokenizer_only(tmp_path: Path) -> None:
    assert "--model" in failed(invoke("cache", "explain", "-", "--show-text", stdin="[1]"), guard.EXIT_USAGE)


def test_cache_of_nobody() -> None:
    with serve_metrics(make_cache(), 0) as server:
        pass
    for command in (["stats"], ["ls"]):
        assert "no server answers" in failed(invoke("cache", *command, "--url", server.url), guard.EXIT_NOT_REACHABLE)


def test_the_command_is_installed_by_its_name(repository: Path) -> None:
    scripts = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["ktransformer-monitor"].partition(":")
    assert getattr(sys.modules[module], function) is monitor_main
