"""`doctor`: every problem it knows is found where it is, with its fix, and not where it is not."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.cli import checkup, guard
from ktransformer2.cli.checkup import Check
from ktransformer2.cli.doctor import shown_checks
from ktransformer2.engine.memory_budget import Memory
from ktransformer2.engine.troubles import TROUBLES
from ktransformer2.monitor import mock, serve_metrics
from ktransformer2.monitor.client import MonitorClient
from tests.cache.factories import make_cache, start
from tests.cli.invoking import assert_as_before, failed, invoke

ALWAYS = [
    "settings",
    "runner",
    "python",
    "ktransformer2",
    "torch",
    "transformers",
    "memory",
    "huge pages",
    "kernels",
    "threads",
]


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory of the test's own, and 1 MB instead of 64."""
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkup, "_SLOW_DISK_BYTES_PER_S", 0.0)
    return tmp_path / "cache"


def problem(check: Check) -> tuple[str, str]:
    assert check.state == "PROBLEM", check
    return check.value, check.fix


def test_what_is_shown() -> None:
    checks = [
        Check("python", "ok", "3.11.7 on Linux x86_64"),
        Check("threads", "note", "1 of 2 usable processors", "unset OMP_NUM_THREADS, or raise it, to use them all"),
        Check("kernels", "PROBLEM", "reference: the native kernels are not built, all is slow", "install again"),
    ]
    assert_as_before("doctor", shown_checks(checks))
    assert shown_checks(checks[:2]).endswith("No problem found.\n")


def test_this_machine(small_probe: Path) -> None:
    result = invoke("doctor", "--json")
    found = json.loads(result.stdout)
    assert set(ALWAYS) <= {check["name"] for check in found["checks"]}
    bad = [check for check in found["checks"] if check["state"] == "PROBLEM"]
    assert found["ok"] == (not bad)
    assert result.exit_code == (guard.EXIT_FAILED if bad else 0)
    assert all(check["fix"] for check in bad)
    assert list(small_probe.iterdir()) == []  # the file that was written is gone


def test_a_problem_is_exit_code_1_and_shown_with_its_fix(small_probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_MEMROY", "1")
    result = invoke("doctor")
    assert result.exit_code == guard.EXIT_FAILED
    assert "PROBLEM  settings" in result.stdout
    assert "did you mean 'KTRANSFORMER_MEMORY'?" in result.stdout
    assert "-> mend it; `ktransformer config check` looks again" in result.stdout
    assert "problem" in result.stdout.splitlines()[-1]


def test_packages() -> None:
    assert checkup.package("torch", ">=2.8").state == "ok"
    assert problem(checkup.package("torch", ">=99"))[1] == 'pip install "torch>=99"'
    assert problem(checkup.package("no-such-package", ">=1")) == ("not installed", 'pip install "no-such-package>=1"')
    wanted = ["torch>=2.8", "transformers<5.25,>=5.20", 'plotext<7,>=6.1; extra == "plots"']
    assert checkup._ranges(wanted) == {"torch": ">=2.8", "transformers": "<5.25,>=5.20"}


def test_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.runner().value.startswith("lean for ")
    assert "llama, mistral, qwen2, qwen3; the modules of transformers" in checkup.runner().value
    monkeypatch.setenv("KTRANSFORMER_RUNNER", "transformers")
    assert checkup.runner().value.startswith("the modules of transformers for every model")
    monkeypatch.setenv("KTRANSFORMER_RUNNER", "fast")
    assert problem(checkup.runner()) == ("'fast' is not allowed", "name one of auto, lean, transformers")


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_KERNELS", "fast")
    assert "is unknown" in problem(checkup.kernels())[0]
    monkeypatch.setenv("KTRANSFORMER_KERNELS", "reference")
    assert "KTRANSFORMER_KERNELS" in problem(checkup.kernels())[1] or "compiler" in problem(checkup.kernels())[1]
    monkeypatch.delenv("KTRANSFORMER_KERNELS")
    monkeypatch.setattr("ktransformer2.kernels.attention.available_backends", lambda: ("reference",))
    monkeypatch.setattr("ktransformer2.kernels.attention.backend_name", lambda: "reference")
    assert "C++ compiler" in problem(checkup.kernels())[1]


def test_threads() -> None:
    import torch

    used = torch.get_num_threads()
    assert checkup.threads(used).state == "ok"
    assert checkup.threads(used + 1).state == "note"
    torch.set_num_threads(3)
    try:
        assert problem(checkup.threads(2)) == ("3 on 2 usable processors", "export OMP_NUM_THREADS=2")
    finally:
        torch.set_num_threads(used)


@pytest.mark.parametrize(("text", "most"), [("100000 100000", 1), ("150000 100000", 2), ("max 100000", 10**6)])
def test_a_control_groups_share_of_processors_counts(text: str, most: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    everywhere = checkup.usable_processors(tmp_path / "missing")
    assert checkup.usable_processors(tmp_path / "cpu.max") == min(everywhere, most)


def test_sleeping_threads() -> None:
    assert checkup.sleeping_threads({"OMP_WAIT_POLICY": "active"}).state == "ok"
    words, fix = problem(checkup.sleeping_threads({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}))
    assert words.startswith("OMP_WAIT_POLICY=PASSIVE, GOMP_SPINCOUNT=0")
    assert fix == "unset OMP_WAIT_POLICY GOMP_SPINCOUNT"


def test_two_openmp_runtimes(tmp_path: Path) -> None:
    line = "7f0000000000-7f0000001000 r-xp 00000000 08:01 1 {}\n"
    maps = tmp_path / "maps"
    maps.write_text(line.format("/a/libgomp.so.1") * 2 + line.format("/a/libc.so.6"))
    assert checkup.runtimes(maps) == Check("OpenMP runtimes", "ok", "libgomp.so.1")
    maps.write_text(line.format("/a/libgomp.so.1") + line.format("/b/libiomp5.so"))
    assert problem(checkup.runtimes(maps))[0] == "2 at once: /a/libgomp.so.1, /b/libiomp5.so"


@pytest.mark.parametrize(
    ("available", "limit", "state"), [(4e9, None, "ok"), (4e9, 5e8, "PROBLEM"), (5e8, None, "PROBLEM")]
)
def test_memory(available: float, limit: float | None, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Memory(int(available), None if limit is None else int(limit))
    monkeypatch.setattr(Memory, "measure", classmethod(lambda cls: found))
    assert checkup.memory().state == state


def test_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    assert checkup.huge_pages(path) == Check("huge pages", "ok", "madvise")
    path.write_text("always madvise [never]\n")
    assert checkup.huge_pages(path).fix == f"echo madvise | sudo tee {path}"
    assert checkup.huge_pages(tmp_path / "missing").state == "note"


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_SLOW_DISK_BYTES_PER_S", 1.0)
    assert checkup.disk(tmp_path, 2**20).state == "ok"
    monkeypatch.setattr(checkup, "_SLOW_DISK_BYTES_PER_S", 1e18)
    assert problem(checkup.disk(tmp_path, 2**20))[0].endswith(": slow")
    usage: Any = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    words, fix = problem(checkup.disk(tmp_path, 2**20))
    assert words == f"{tmp_path}, 1 MB free"
    assert "KTRANSFORMER_CACHE" in fix
    assert list(tmp_path.iterdir()) == []


def test_a_cache_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path / "file" / "below"))
    checks = {check.name: check for check in checkup.checkup()}
    assert "KTRANSFORMER_CACHE" in problem(checks["cache directory"])[1]


# --- a cache at work


def test_live_with_the_defaults_finds_nothing() -> None:
    result = invoke("doctor", "--live")
    assert result.exit_code == 0, result.stdout
    assert_as_before("doctor-live", result.stdout)


@pytest.mark.parametrize(
    ("settings", "trouble"),
    [
        ({"KTRANSFORMER_MIN_CHUNK_TOKENS": "16", "KTRANSFORMER_GROWTH_FACTOR": "1"}, "small steps"),
        ({"KTRANSFORMER_CACHED_SHARE_RATIO": "0"}, "eviction churn"),
    ],
)
def test_live_shows_what_a_bad_knob_does(
    settings: dict[str, str], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    result = invoke("doctor", "--live", "--json")
    assert result.exit_code == guard.EXIT_FAILED
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert trouble in [finding["trouble"] for finding in found["findings"]]
    assert f"TROUBLE  {trouble}: " in invoke("doctor", "--live").stdout


def test_live_reads_the_counters_of_a_run(tiny_model_folder: Path, tmp_path: Path) -> None:
    run = invoke("run", tiny_model_folder, "-p", "Hello", "--memory", "64MB", "--max-new-tokens", "2", "--json")
    counters = tmp_path / "counters.json"
    counters.write_text(run.stdout, encoding="utf-8")
    result = invoke("doctor", "--live", "--stats", counters, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["source"] == str(counters)
    assert found["stats"] == json.loads(run.stdout)["stats"]
    bad = json.loads(run.stdout)
    bad["stats"]["engine"] |= {"num_preemptions": 50, "num_added": 10}
    counters.write_text(json.dumps(bad), encoding="utf-8")
    result = invoke("doctor", "--live", "--stats", counters)
    assert result.exit_code == guard.EXIT_FAILED
    assert "num_preemptions = 50, past 1" in result.stdout


@pytest.mark.parametrize(("content", "why"), [("{", "is no JSON"), ("{}", "no snapshot")])
def test_live_refuses_what_is_no_snapshot(content: str, why: str, tmp_path: Path) -> None:
    counters = tmp_path / "counters.json"
    counters.write_text(content, encoding="utf-8")
    message = failed(invoke("doctor", "--live", "--stats", counters), guard.EXIT_USAGE)
    assert str(counters) in message
    assert why in message


def test_live_reads_a_running_cache() -> None:
    with closing(make_cache()) as cache, serve_metrics(cache, 0) as server:
        result = invoke("doctor", "--live", "--url", server.url)
        assert result.exit_code == 0, result.stderr
        told, figures, last = result.stdout.splitlines()
        assert told == f"Counters of the cache at {server.url}; of its engine none is served."
        assert figures.startswith("hit ratio ")
        assert "preemptions" not in figures + last
        table = start(cache, list(range(20)))
        assert table is not None
        cache.release(table)
        cache.maintain()
        found = json.loads(invoke("doctor", "--live", "--url", server.url, "--json").stdout)
        assert (found["ok"], found["source"], found["findings"]) == (True, server.url, [])


def test_live_finds_what_troubles_a_running_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = mock.answer(0)
    answer["cache"] |= {"lookup_tokens": 10**6, "hit_tokens": 0, "evictions": {"room": 10**6}}
    monkeypatch.setattr(MonitorClient, "stats", lambda self: answer)
    result = invoke("doctor", "--live", "--url", "http://127.0.0.1:1")
    assert result.exit_code == guard.EXIT_FAILED
    assert "TROUBLE  eviction churn: " in result.stdout


def test_live_without_a_server_is_not_reachable() -> None:
    message = failed(invoke("doctor", "--live", "--url", "http://127.0.0.1:9"), guard.EXIT_NOT_REACHABLE)
    assert "no server answers at http://127.0.0.1:9" in message


def test_live_wants_one_source(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    both = invoke("doctor", "--live", "--url", "http://127.0.0.1:9", "--stats", tmp_path / "x")
    assert failed(both, guard.EXIT_USAGE) == "error: give one of --url and --stats"
    alone = invoke("doctor", "--live", "--key-file", tmp_path / "x")
    assert failed(alone, guard.EXIT_USAGE) == "error: --key-file goes with --url"


def test_the_manual_names_every_trouble(repository: Path) -> None:
    manual = (repository / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert all(f"| {trouble} |" in manual for trouble in TROUBLES)
