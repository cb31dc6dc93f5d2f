"""`doctor`: every problem it knows is found where it is, with its fix, and not where it is not."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import ktransformer2
from ktransformer2.bench import environment
from ktransformer2.cli import checkup, guard
from ktransformer2.cli.checkup import Check
from ktransformer2.cli.doctor import shown_checks
from ktransformer2.engine.memory_budget import Memory
from ktransformer2.engine.troubles import TROUBLES
from ktransformer2.monitor import mock, serve_metrics
from ktransformer2.monitor.client import MonitorClient
from tests.cache.factories import make_cache, start
from tests.cli.invoking import assert_as_before, failed, invoke

# What `doctor` shows on every machine, in this order; an installed package shows those of its range too.
ALWAYS = [
    "settings",
    "runner",
    "python",
    "ktransformer2",
    "torch",
    "transformers",
    "OpenMP waiting",
    "memory",
    "huge pages",
    "processor",
    "kernels",
    "threads",
    "OpenMP runtimes",
    "cache directory",
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
    assert [check["name"] for check in found["checks"] if check["name"] not in checkup._RANGED[2:]] == ALWAYS
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


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KTRANSFORMER_PERSIST", raising=False)  # which tests set
    assert checkup.settings() == Check("settings", "ok", "all defaults")
    monkeypatch.setenv("KTRANSFORMER_MEMORY", "2GB")
    monkeypatch.setenv("KTRANSFORMER_KV", "full")
    assert checkup.settings() == Check("settings", "ok", "memory, kv set")
    monkeypatch.setenv("KTRANSFORMER_KV", "int3")
    words, fix = problem(checkup.settings())
    assert words.endswith("kv='int3' is not allowed; allowed: auto, full, int8")
    assert fix == "mend it; `ktransformer config check` looks again"
    assert checkup.runner() == Check("runner", "note", "not known while the settings are wrong")


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"python_version": "3.12.1", "system": "Linux", "machine": "x86_64"}.items():
        monkeypatch.setattr(platform, name, lambda value=value: value)
    assert checkup.python() == Check("python", "ok", "3.12.1 on Linux x86_64")


def test_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = dict.fromkeys(checkup._RANGED, "3.1")
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=4", "numpy>=2; extra == 'plots'"])
    assert checkup.packages() == [
        Check("ktransformer2", "ok", ktransformer2.__version__),
        Check("torch", "PROBLEM", "3.1, promised is >=4", 'pip install "torch>=4"'),
        *(Check(name, "ok", "3.1") for name in checkup._RANGED[1:]),
    ]

    def not_installed(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", not_installed)
    here = f"{ktransformer2.__version__}, not installed"
    assert checkup.packages() == [
        Check("ktransformer2", "note", here, "`pip install .` checks versions too"),
        Check("torch", "ok", "3.1"),
        Check("transformers", "ok", "3.1"),
    ]


def test_torch_that_cannot_be_imported_ends_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError(f"lib{name}.so is missing")

    monkeypatch.setattr(importlib, "import_module", broken)
    last = Check("torch", "PROBLEM", "cannot be imported (libtorch.so is missing)", "install it again")
    checks = checkup.checkup()
    assert checks[-1] == last
    assert "kernels" not in {check.name for check in checks}


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (("avx2",), "EPYC: avx2; no bf16 arithmetic: models are computed in float32"),
        (("avx2", "avx512_bf16"), "EPYC: avx2 avx512_bf16"),
        (("avx2", "amx_bf16"), "EPYC: avx2 amx_bf16"),
        ((), "EPYC: no flags known"),
    ],
)
def test_processor(flags: tuple[str, ...], value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cpuinfo", lambda: ("EPYC", list(flags)))
    assert checkup.processor() == Check("processor", "ok", value)


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
    words, fix = problem(checkup.kernels())
    assert "is unknown" in words
    assert fix == "unset KTRANSFORMER_KERNELS"
    found = {"available": ("avx2", "reference"), "name": "avx2"}
    monkeypatch.setattr("ktransformer2.kernels.attention.available_backends", lambda: found["available"])
    monkeypatch.setattr("ktransformer2.kernels.attention.backend_name", lambda: found["name"])
    assert checkup.kernels() == Check("kernels", "ok", "avx2; available: avx2, reference")
    found["name"] = "reference"
    assert problem(checkup.kernels()) == (
        "reference; available: avx2, reference",
        "unset KTRANSFORMER_KERNELS: avx2 is faster",
    )
    found["available"] = ("reference",)
    assert problem(checkup.kernels()) == (
        "reference: the native kernels are not built, all is slow",
        "have a C++ compiler at hand (apt install g++, or Xcode's) and install the package again",
    )


def test_threads() -> None:
    import torch

    used = torch.get_num_threads()
    assert checkup.threads(used) == Check("threads", "ok", f"{used} of {used} usable processors")
    more = f"{used} of {used + 1} usable processors"
    assert checkup.threads(used + 1) == Check(
        "threads", "note", more, "unset OMP_NUM_THREADS, or raise it, to use them all"
    )
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
    assert checkup.sleeping_threads({"OMP_WAIT_POLICY": "active"}) == Check("OpenMP waiting", "ok", "active")
    assert problem(checkup.sleeping_threads({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"})) == (
        "OMP_WAIT_POLICY=PASSIVE, GOMP_SPINCOUNT=0: every kernel starts late",
        "unset OMP_WAIT_POLICY GOMP_SPINCOUNT",
    )


def test_two_openmp_runtimes(tmp_path: Path) -> None:
    line = "7f0000000000-7f0000001000 r-xp 00000000 08:01 1 {}\n"
    maps = tmp_path / "maps"
    maps.write_text(line.format("/a/libgomp.so.1") * 2 + line.format("/a/libc.so.6"))
    assert checkup.runtimes(maps) == Check("OpenMP runtimes", "ok", "libgomp.so.1")
    maps.write_text(line.format("/a/libgomp.so.1") + line.format("/b/libiomp5.so"))
    assert problem(checkup.runtimes(maps)) == (
        "2 at once: /a/libgomp.so.1, /b/libiomp5.so",
        "install torch and this package into one fresh environment",
    )
    maps.write_text(line.format("/a/libc.so.6"))
    assert checkup.runtimes(maps) == Check("OpenMP runtimes", "ok", "none")
    assert checkup.runtimes(tmp_path / "missing") == Check("OpenMP runtimes", "note", "this system does not say")


@pytest.mark.parametrize(
    ("available", "limit", "state", "words"),
    [
        (4e9, None, "ok", "4 GB available"),
        (4e9, 2e9, "ok", "4 GB available, limited to 2 GB by the control group"),
        (4e9, 5e8, "PROBLEM", "4 GB available, limited to 500 MB by the control group"),
        (5e8, None, "PROBLEM", "500 MB available"),
    ],
)
def test_memory(available: float, limit: float | None, state: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Memory(int(available), None if limit is None else int(limit))
    monkeypatch.setattr(Memory, "measure", classmethod(lambda cls: found))
    fix = "stop other programs, or raise the limit; a small model needs 1 GB" if state == "PROBLEM" else ""
    check = checkup.memory()
    assert (check.name, check.state, check.value, check.fix) == ("memory", state, words, fix)


def test_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    assert checkup.huge_pages(path) == Check("huge pages", "ok", "madvise")
    path.write_text("always madvise [never]\n")
    assert checkup.huge_pages(path) == Check("huge pages", "note", "switched off", f"echo madvise | sudo tee {path}")
    assert checkup.huge_pages(tmp_path / "missing") == Check("huge pages", "note", "this system has none to ask for")


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = shutil.disk_usage(tmp_path)
    free = {"bytes": 5 * 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free["bytes"]))
    monkeypatch.setattr(checkup, "_SLOW_DISK_BYTES_PER_S", 1.0)
    assert checkup.disk(tmp_path, 2**20).state == "ok"
    assert list(tmp_path.iterdir()) == []
    seconds = {"written": 2**20 / 80e6, "read": 2**20 / 200e6}
    monkeypatch.setattr(checkup, "_disk_seconds", lambda *_: tuple(seconds.values()))
    speed = f"{tmp_path}, 5 GB free; writes 80 MB/s, reads 200 MB/s"
    assert checkup.disk(tmp_path, 2**20) == Check("cache directory", "ok", speed)
    monkeypatch.setattr(checkup, "_SLOW_DISK_BYTES_PER_S", 201e6)
    assert problem(checkup.disk(tmp_path, 2**20)) == (f"{speed}: slow", "name a faster one with KTRANSFORMER_CACHE")
    free["bytes"] = 10**6
    assert problem(checkup.disk(tmp_path, 2**20)) == (
        f"{tmp_path}, 1 MB free",
        "make room (`ktransformer models rm NAME`), or name another with KTRANSFORMER_CACHE",
    )


def test_a_disk_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, num_bytes: int) -> tuple[float, float]:
        raise PermissionError("not allowed")

    monkeypatch.setattr(checkup, "_LEAST_FREE_DISK_BYTES", 0)
    monkeypatch.setattr(checkup, "_disk_seconds", refused)
    assert problem(checkup.disk(tmp_path, 2**20)) == (
        f"{tmp_path} cannot be used (not allowed)",
        "allow it, or name another with KTRANSFORMER_CACHE",
    )


def test_a_cache_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path / "file" / "below"))
    checks = {check.name: check for check in checkup.checkup()}
    words, fix = problem(checks["cache directory"])
    assert str(tmp_path / "file" / "below") in words
    assert fix == "name a writable one with KTRANSFORMER_CACHE"


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
