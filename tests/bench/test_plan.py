"""How a plan is held against a process; the process itself is measured by `bench plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktransformer2.bench import plan
from ktransformer2.bench.outcome import BenchOptions
from ktransformer2.bench.targets import broken, targets_of

FORMS = [{"kv": kv, "form": form, "kv_bytes": 9_000_000} for kv, form in (("full", "bf16"), ("int8", "int8"))]
PLANNED = {"forms": FORMS, "peak_bytes": 950_000_000, "weight_bytes": 1, "workspace_bytes": 1, "process_bytes": 1}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """No process: the plan is 950 MB, the process takes 1,000 MB."""
    calls: list[tuple[str, ...]] = []

    def answer(*command: str) -> dict[str, Any]:
        calls.append(command)
        return PLANNED if "--json" in command else {"peak_bytes": 1_000_000_000, "kv_bytes": 12_000_000}

    monkeypatch.setattr(plan, "_in_a_process", answer)
    return calls


def test_the_worst_difference_counts(asked: list[tuple[str, ...]]) -> None:
    outcome = plan.run(BenchOptions(quick=True, model="a-model"))
    assert outcome.summary == {"plan_error": pytest.approx(0.05)}
    assert set(outcome.summary) == set(targets_of("plan"))
    assert not broken("plan", {"plan_error": 0.05})
    assert broken("plan", {"plan_error": 0.0501})
    (row,) = outcome.rows
    assert (row["planned_mb"], row["measured_mb"], row["error"]) == (950.0, 1000.0, pytest.approx(-0.05))


def test_plan_and_process_get_the_same_setting(asked: list[tuple[str, ...]]) -> None:
    plan.run(BenchOptions(quick=True, model="a-model"))
    planned, measured = asked
    assert planned[:3] == ("ktransformer2.cli", "plan", "a-model")
    assert planned[3:9] == ("--dtype", "fp32", "--kv", "int8", "--ctx", "512")
    assert measured == ("ktransformer2.bench.plan", "a-model", "fp32", "int8", "512")


def test_one_dtype_alone(asked: list[tuple[str, ...]]) -> None:
    rows = plan.run(BenchOptions(dtype="bf16", model="a-model")).rows
    assert {row["dtype"] for row in rows} == {"bf16"}


def test_a_process_that_fails_says_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="no_such_module"):
        plan._in_a_process("ktransformer2.no_such_module")


def test_the_peak_is_what_the_system_counts(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmPeak:\t  900 kB\nVmHWM:\t  250 kB\nVmRSS:\t  100 kB\n")
    assert plan.peak_resident_bytes(status) == 250 * 1024
    assert plan.peak_resident_bytes() > 10**7
