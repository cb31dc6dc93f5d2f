"""The whole scenario with workers that compute nothing: who runs when, who is named, what is concluded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ktransformer2.bench.outcome import BenchOptions, Outcome
from ktransformer2.bench.peers import environments, field, scenario
from ktransformer2.bench.peers.contenders import OURS, WIDTHS, Contender, contenders
from ktransformer2.bench.peers.environments import install, python_of
from ktransformer2.bench.peers.field import Field, environment_of
from ktransformer2.bench.peers.model_files import rewrite
from ktransformer2.bench.peers.parts import repeated
from ktransformer2.bench.peers.plot import draw, in_terminal, lines
from ktransformer2.bench.peers.process import PeerError, PeerProcess
from ktransformer2.errors import ConfigError

PEERS = ("transformers", "llamacpp", "xllamacpp", "vllm", "openvino")
# Claims times of its own worker's making, far below what passes, and writes down what it was asked.
FAKE = """
import os
from pathlib import Path
NANO = {{"ours": 1, "hf": 8, "llamacpp": 4, "xllama": 6, "vllm_cpu": 5, "genai": 2}}[Path(__file__).stem] * 1e-9
class Peer:
    def __init__(self, model, threads, **options):
        self.name, self.nano = " ".join(map(str, options.values())), NANO
        if options.get("kv") == "full":
            self.nano *= 1.5
        if Path(__file__).stem in {broken!r}:
            raise RuntimeError("no such instruction on this processor")
    def about(self):
        return {{"version": Path(__file__).stem, "threads": os.environ["OMP_NUM_THREADS"]}}
    def log(self, *words):
        with open({log!r}, "a") as file:
            print(Path(__file__).stem, *words, file=file)
    def read(self, ids, room, reuse):
        self.log("read", len(ids), room, reuse)
        return {{"first_s": self.nano * len(ids) / 512, "token": 0}}
    def decode(self, count):
        if Path(__file__).stem in {dying!r}:
            os._exit(1)
        return {{"seconds": [self.nano] * count, "tokens": [0] * count}}
    def batch(self, prompts, count):
        self.log("batch", len(prompts), len(prompts[0]), count)
        return {{"seconds": self.nano, "tokens": [[0] * count] * len(prompts)}}
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All peers are installed and run the fake; the file it writes."""
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path / "cache"))
    for peer in PEERS:
        python = tmp_path / "cache" / "peers" / peer / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        (python.parent.parent / "requirements.txt").write_text("")
    monkeypatch.setattr(field, "WORKERS", tmp_path)
    monkeypatch.setattr(scenario, "model_in", lambda form, source: source.with_name(form))
    monkeypatch.setattr(scenario, "_text", lambda source: list(range(9_000)))
    (tmp_path / "model.gguf").touch()
    write_fakes(tmp_path)
    return tmp_path / "log"


def write_fakes(folder: Path, broken: tuple[str, ...] = (), dying: tuple[str, ...] = ()) -> None:
    for contender in contenders(False, 8192):
        text = FAKE.format(log=str(folder / "log"), broken=broken, dying=dying)
        (folder / contender.worker).write_text(text)


def quick(log: Path, *parts: str) -> Outcome:
    return scenario.run(BenchOptions(quick=True, model=str(log.with_name("model.gguf")), parts=parts))


def asked(log: Path) -> set[str]:
    return set(log.read_text().splitlines())


# --- the scenario


def test_everybody_runs_and_ratios_follow(log: Path) -> None:
    outcome = quick(log)
    assert outcome.summary == pytest.approx(
        {
            "decode_vs_best_512_bf16": 2.0,
            "ttft_vs_best_512": 0.5,
            "warm_ttft_vs_best": 0.5,
            "batch8_vs_best": 2.0,
        }
    )
    rows = {str(row["contender"]): row for row in outcome.rows if row["part"] == "behind 512 tokens"}
    assert set(rows) == {contender.name for contender in contenders(False, 8192)}
    ov = rows["OpenVINO, 16 bit, u8 KV"]
    assert ov["runs"] == "f16 weights, u8 KV"
    assert ov["ms_per_token"] == pytest.approx(2e-6)
    assert ov["first_s"] == pytest.approx(2e-9)
    assert ov["times_ours"] == pytest.approx(2.0)
    assert rows["OpenVINO, int4"]["times_ours"] is None
    assert 2 < float(str(ov["peak_mb"])) < 1000
    about: Any = outcome.configuration["contenders"]
    assert about["vLLM"]["version"] == "vllm_cpu"
    assert about["vLLM"]["threads"] == str(outcome.configuration["threads"])


def test_a_part_asks_only_those_who_take_part(log: Path) -> None:
    quick(log, "batch")
    assert {line for line in asked(log) if "batch" in line} == {
        f"{worker} batch 4 128 16" for worker in ("ours", "hf", "llamacpp", "vllm_cpu", "genai")
    }
    assert not any("xllama" in line for line in asked(log))
    log.unlink()
    quick(log, "warm")
    assert {line for line in asked(log) if line.startswith("vllm")} == {
        "vllm_cpu read 64 4 False",  # the other text
        "vllm_cpu read 512 0 True",
        "vllm_cpu read 528 0 True",
    }


def test_those_who_fail_are_named_and_two_engines_are_too_few(log: Path) -> None:
    write_fakes(log.parent, broken=("genai",), dying=("vllm_cpu",))
    outcome = quick(log)
    why = {row["contender"]: str(row["why"]) for row in outcome.rows if row["part"] == "failed"}
    assert why["OpenVINO, int8"] == "load: RuntimeError: no such instruction on this processor"
    assert why["vLLM"].startswith("decode: it has ended with 1")
    assert len(why) == 5
    assert outcome.summary == {}
    assert {row["contender"] for row in outcome.rows if row["part"] == "4 requests at once"} == {
        "ours",
        "transformers, DynamicCache, explicit mask",
        "llama.cpp, 16 bit",
    }


def test_a_peer_that_is_not_installed_is_named(log: Path) -> None:
    home = log.parent / "cache" / "peers"
    (home / "vllm" / "why-not.txt").write_text("no matching distribution")
    (home / "openvino" / "requirements.txt").unlink()
    why = {row["contender"]: row["why"] for row in quick(log, "warm").rows if row["part"] == "failed"}
    assert why == {
        "vLLM": "it did not install: no matching distribution",
        "OpenVINO, 16 bit, u8 KV": "it is not installed; `make bench-peers` does that",
    }


def test_only_a_gguf_file_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes a \.gguf file"):
        scenario.run(BenchOptions(model=str(tmp_path)))


def test_who_is_measured_where() -> None:
    everybody = contenders(True, 8192)
    full = dict(scenario.schedule(BenchOptions(), everybody))
    assert list(full) == [512, 2048, 4096, 8000]
    assert full[512] == full[8000] == list(everybody)
    assert [contender.peer for contender in full[2048]] == [
        OURS,
        "transformers",
        "llamacpp",
        "xllamacpp",
        "vllm",
        "openvino",
    ]
    assert list(dict(scenario.schedule(BenchOptions(parts=("decode",)), everybody))) == [512, 8000]
    assert list(dict(scenario.schedule(BenchOptions(parts=("warm",)), everybody))) == []
    assert scenario.lengths(BenchOptions(quick=True)) == [512]
    assert scenario.lengths(BenchOptions(max_tokens=4096)) == [512, 2048, 4096]
    assert scenario.lengths(BenchOptions(max_tokens=100)) == [100]


@pytest.mark.parametrize("bf16_units", [True, False])
def test_contenders_have_names_widths_and_workers(bf16_units: bool) -> None:
    everybody = contenders(bf16_units, 8192)
    assert len({contender.name for contender in everybody}) == len(everybody)
    assert {contender.width for contender in everybody} == set(WIDTHS)
    assert {contender.peer for contender in everybody} == {OURS, *PEERS}
    for contender in everybody:
        assert (field.WORKERS / contender.worker).is_file()
        assert set(contender.parts) <= set(scenario.PARTS)
    dtypes = {str(contender.options["dtype"]) for contender in everybody if "dtype" in contender.options}
    assert dtypes == {"bfloat16" if bf16_units else "float32"}
    (llama,) = (contender for contender in everybody if contender.name == "llama.cpp, 16 bit")
    assert llama.model == ("bf16" if bf16_units else "f16")


# --- what is asked how often


def test_another_round_comes_only_while_it_fits() -> None:
    now = [0.0]

    def round_() -> None:
        now[0] += 10.0

    assert repeated(round_, 3, 100.0, lambda: now[0]) == 3
    assert repeated(round_, 3, 20.0, lambda: now[0]) == 2
    assert repeated(round_, 3, 0.0, lambda: now[0]) == 1
    assert now == [60.0]


# --- the field


def test_turns_come_in_another_order_each_and_one_that_fails_is_out(log: Path) -> None:
    calls: list[list[str]] = []
    names = [f"c{i}" for i in range(4)]
    with Field(lambda form: log, 1, seed=0) as there:
        there.start([Contender(name, OURS, "bf16", "file", "", options={"name": name}) for name in names])
        for _ in range(4):
            order: list[str] = []

            def note(peer: PeerProcess, order: list[str] = order) -> None:
                order.append(str(id(peer)))

            there.turn(there.running("decode"), note)
            calls.append(order)

        def fail(peer: PeerProcess) -> None:
            raise PeerError("no more")

        assert there.turn(there.running("decode")[:1], fail) == {}
        assert [contender.name for contender in there.running("decode")] == names[1:]
    assert there.failures == {"c0": "no more"}
    assert len({tuple(order) for order in calls}) > 1
    assert len({frozenset(order) for order in calls}) == 1


def test_only_ours_sees_the_package() -> None:
    before = {"PYTHONPATH": "src", "HOME": "/home", "OMP_NUM_THREADS": "9"}
    theirs = environment_of(Contender("c", "vllm", "bf16", "file", ""), before, 2)
    assert theirs == {"HOME": "/home", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    ours = environment_of(Contender("c", OURS, "bf16", "file", ""), before, 2)
    assert ours.pop("PYTHONPATH").split(":") == sys.path
    assert ours == theirs


# --- environments


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path))
    commands: list[tuple[list[str], str | None]] = []

    def done(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        commands.append((command, settings["env"].get("CMAKE_ARGS")))
        if command[1:3] == ["-m", "venv"]:
            Path(command[3]).mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", done)
    requirements = tmp_path / "llamacpp.txt"
    requirements.write_text("llama-cpp-python==1\n")
    install("llamacpp", requirements)
    home = tmp_path / "peers" / "llamacpp"
    assert [command[1:3] for command, _ in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert commands[1][0][-2:] == ["-r", str(requirements)]
    assert "GGML_NATIVE=ON" in str(commands[1][1])
    assert python_of("llamacpp") == home / "bin" / "python"
    install("llamacpp", requirements)
    assert len(commands) == 2
    requirements.write_text("llama-cpp-python==2\n")
    install("llamacpp", requirements)
    assert len(commands) == 4
    requirements.rename(tmp_path / "vllm.txt")
    install("vllm", tmp_path / "vllm.txt")
    assert commands[-1][0][-3:] == ["torchvision", "torchaudio", "torchcodec"]


def test_one_that_does_not_install_leaves_its_error_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KTRANSFORMER_CACHE", str(tmp_path / "cache"))
    for peer in ("a", "b"):
        (tmp_path / f"{peer}.txt").write_text(peer)

    def done(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        del settings
        failed = str(tmp_path / "a.txt") in command
        return subprocess.CompletedProcess(command, failed, "", "no  such\nwheel" if failed else "")

    monkeypatch.setattr(subprocess, "run", done)
    (tmp_path / "cache" / "peers" / "b").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    environments.main(tmp_path, [])
    assert "a: it did not install: no such wheel" in capsys.readouterr().err
    with pytest.raises(PeerError, match="it did not install: no such wheel"):
        python_of("a")
    assert python_of("b").name == "python"
    with pytest.raises(ConfigError, match="there is no peer 'c'"):
        environments.main(tmp_path, ["c"])


def test_every_peer_has_pinned_requirements() -> None:
    folder = Path(__file__).parents[2] / "requirements" / "peers"
    assert {path.stem for path in folder.glob("*.txt")} == set(PEERS)
    for path in folder.glob("*.txt"):
        lines_ = [line for line in path.read_text().splitlines() if not line.startswith(("#", "-"))]
        assert lines_
        assert all("==" in line for line in lines_), path


# --- model files


def test_a_gguf_file_is_rewritten_in_another_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_context_length(128)
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 3])
    matrix = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(4, 64)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("m.weight", gguf.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    before = gguf.GGUFReader(tmp_path / "a.gguf")
    unpacked = gguf.dequantize(before.tensors[0].data, kind)
    for name, most in (("F16", 1e-3), ("BF16", 4e-3), ("Q8_0", 1e-2)):
        wanted = gguf.GGMLQuantizationType[name]
        rewrite(tmp_path / "a.gguf", tmp_path / name, wanted)
        after = gguf.GGUFReader(tmp_path / name)
        assert {n: f.contents() for n, f in after.fields.items() if not n.startswith("GGUF.")} == {
            n: f.contents() for n, f in before.fields.items() if not n.startswith("GGUF.")
        }
        tensors = {tensor.name: tensor for tensor in after.tensors}
        assert tensors["m.weight"].tensor_type is wanted
        assert tensors["m.weight"].shape.tolist() == [64, 4]
        assert tensors["norm.weight"].tensor_type is gguf.GGMLQuantizationType.F32
        assert np.abs(gguf.dequantize(tensors["m.weight"].data, wanted) - unpacked).max() < most


# --- the picture


ROWS: list[dict[str, object]] = [
    {"contender": name, "prompt_tokens": length, "ms_per_token": ms, "first_s": ms / 10}
    for name, length, ms in (("ours", 8000, 4.0), ("ours", 512, 3.0), ("vLLM", 512, 5.0))
]


def test_a_line_needs_two_lengths(tmp_path: Path) -> None:
    assert lines(ROWS, "ms_per_token") == {"ours": [(512, 3.0), (8000, 4.0)]}
    assert "ours" in str(in_terminal(ROWS))
    assert draw(ROWS, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert in_terminal(ROWS[1:]) is None
    assert not draw(ROWS[1:], tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_the_picture_lies_beside_the_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ktransformer2.bench import run

    model = BenchOptions(model=str(log.with_name("model.gguf")), parts=("context",), max_tokens=2048)
    assert run.main("peers", json_path=log.with_name("r.json"), options=model) == 0
    assert json.loads(log.with_name("r.json").read_text())["bench"] == "peers"
    assert log.with_name("r.png").is_file()
    assert f"Plot: {log.with_name('r.png')}" in capsys.readouterr().err
