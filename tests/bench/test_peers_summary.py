"""What follows from seconds, on fixed ones: who is the best of a width, and when nothing is said."""

from __future__ import annotations

import pytest

from ktransformer2.bench.peers import summary
from ktransformer2.bench.peers.contenders import Contender
from ktransformer2.bench.peers.summary import Standing
from ktransformer2.bench.targets import targets_of


def contender(name: str, peer: str, width: str = "bf16", full_kv: bool = False) -> Contender:
    return Contender(name, peer, width, "file", "", full_kv=full_kv)


OURS, FULL = contender("ours", "ours"), contender("full", "ours", full_kv=True)
ALL = [
    OURS,
    FULL,
    contender("ours8", "ours", "int8"),
    contender("stock", "transformers"),
    contender("static", "transformers"),
    contender("llama", "llamacpp"),
    contender("llama4", "llamacpp", "int4"),
    contender("wheel", "xllamacpp"),
    contender("vllm", "vllm"),
    contender("ov", "openvino"),
    contender("ov8", "openvino", "int8"),
]
TOKEN = {
    "ours": [1.0, 2.0, 4.0],
    "full": [1.5, 2.4, 5.2],
    "ours8": [1.0, 1.0, 1.0],
    "stock": [9.0, 9.0, 9.0],
    "static": [3.0, 6.0, 12.0],
    "llama": [5.0, 5.0, 5.0],
    "llama4": [1.0, 1.0, 1.0],
    "wheel": [4.0, 8.0, 16.0],
    "vllm": [7.0, 7.0, 7.0],
    "ov": [1.5, 3.0, 8.0],
    "ov8": [2.0, 3.0, 2.0],
}
FIRST = {"ours": [2.0], "full": [2.5], "stock": [8.0], "static": [10.0], "llama": [16.0], "vllm": [5.0], "ov": [4.0]}


def test_the_keys_of_the_long_prompt() -> None:
    assert summary.of_length(ALL, FIRST, TOKEN, "8k") == {
        "decode_vs_best_8k_bf16": 1.5,  # OpenVINO: 1.5, 1.5, 2
        "decode_vs_best_8k_int8": 2.0,
        "decode_vs_hf_best_8k": 3.0,  # the static cache
        "decode_vs_llamacpp_8k": 2.5,  # its native build: a median of 5, the wheel's is 8
        "decode_vs_vllm_8k": 3.5,
        "decode_vs_openvino_8k": 1.5,
        "ttft_vs_best_8k": 0.5,
        "ttft_vs_llamacpp_8k": 0.125,
        "ttft_vs_hf_8k": 0.25,
        "int8_kv_vs_full_kv_decode_8k": 1.3,
        "int8_kv_vs_full_kv_ttft_8k": 0.8,
    }


def test_the_keys_of_the_short_prompt() -> None:
    assert summary.of_length(ALL, FIRST, TOKEN, "512") == {
        "decode_vs_best_512_bf16": 1.5,
        "decode_vs_best_512_int8": 2.0,
        "ttft_vs_best_512": 0.5,
    }


def test_a_width_that_ours_does_not_serve_is_unknown() -> None:
    """llama.cpp has int4 here, ours has not; nobody but ours would have int8 without OpenVINO."""
    assert "decode_vs_best_8k_int4" not in summary.of_length(ALL, FIRST, TOKEN, "8k")
    without = {name: seconds for name, seconds in TOKEN.items() if name != "ov8"}
    assert "decode_vs_best_8k_int8" not in summary.of_length(ALL, FIRST, without, "8k")


def test_two_builds_of_one_engine_are_one_and_two_engines_are_too_few() -> None:
    few = {name: TOKEN[name] for name in ("ours", "ours8", "stock", "static", "llama", "wheel")}
    assert Standing(ALL, few).num_engines == 2
    found = summary.of_length(ALL, {}, few, "8k")
    assert found == {"decode_vs_hf_best_8k": 3.0, "decode_vs_llamacpp_8k": 2.5}
    assert Standing(ALL, few | {"ov8": [2.0, 3.0, 2.0]}).best_over_ours("int8") == 2.0


def test_nothing_is_said_of_ours_where_it_failed() -> None:
    failed = {name: seconds for name, seconds in TOKEN.items() if name != "ours"}
    assert summary.of_length(ALL, {}, failed, "8k") == {"decode_vs_best_8k_int8": 2.0}
    assert summary.slowdown(ALL, failed, TOKEN) == {}
    assert summary.slowdown(ALL, TOKEN, failed) == {}


def test_slowdown_warm_and_at_once() -> None:
    assert summary.slowdown(ALL, TOKEN, {"ours": [3.0]}) == {"decode_slowdown_512_to_8k": 1.5}
    assert summary.of_warm(ALL, FIRST) == {"warm_ttft_vs_best": 0.5}
    assert summary.of_batch(ALL, FIRST) == {"batch8_vs_best": 2.0}
    assert summary.of_warm(ALL, {"ours": [1.0]}) == {}


@pytest.mark.parametrize("length", ["512", "8k"])
def test_every_key_has_a_target(length: str) -> None:
    every = [*ALL, contender("ours4", "ours", "int4")]
    found = summary.of_length(every, FIRST, TOKEN | {"ours4": [1.0, 1.0, 1.0]}, length)
    assert f"decode_vs_best_{length}_int4" in found
    assert set(found) < set(targets_of("peers"))
