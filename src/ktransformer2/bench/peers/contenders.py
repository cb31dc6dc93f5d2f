"""Who takes part: each peer at its best settings, in every width of weights that it serves. Starts nothing.

A contender is one process. Width `bf16` is what runs best from 16-bit weights: bf16 where the processor multiplies
it,
else f16 weights (llama.cpp, OpenVINO) or fp32 (transformers, vLLM, ours), since bf16 without units is far slower. The
parts `warm` and `batch` compare one contender of every peer, in that width where the peer has it; `context` compares
defaults on the same file, or its unpacked weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTHS = ("bf16", "int8", "int4")
OURS = "ours"
ENGINES = {
    OURS: OURS,
    "transformers": "transformers",
    "llamacpp": "llama.cpp",
    "xllamacpp": "llama.cpp",
    "vllm": "vllm",
    "openvino": "openvino",
}
_WORKERS = {
    OURS: "ours",
    "transformers": "hf",
    "llamacpp": "llamacpp",
    "xllamacpp": "xllama",
    "vllm": "vllm_cpu",
    "openvino": "genai",
}
_ALL = ("decode", "warm", "batch")


@dataclass(frozen=True)
class Contender:
    """`peer` names the environment, `model` the form of the weights' file (see `model_files`), `runs` says it in words.

    `parts`: those of the scenario that it takes part in. `full_kv`: ours with an unquantised cache, which stands beside
    ours and is compared with no peer.
    """

    name: str
    peer: str
    width: str
    model: str
    runs: str
    parts: tuple[str, ...] = ("decode",)
    options: Mapping[str, Any] = field(default_factory=dict)
    full_kv: bool = False

    @property
    def engine(self) -> str:
        """Two builds of one engine are one rival."""
        return ENGINES[self.peer]

    @property
    def worker(self) -> str:
        return f"{_WORKERS[self.peer]}.py"


def contenders(bf16_units: bool, max_tokens: int) -> tuple[Contender, ...]:
    """All of them. `bf16_units`: whether the processor multiplies bf16. `max_tokens`: the longest sequence."""
    dtype = "bfloat16" if bf16_units else "float32"
    gguf = "bf16" if bf16_units else "f16"
    torch_runs = f"{dtype} from 16-bit weights"
    room = {"max_tokens": max_tokens}
    kv = "bf16" if bf16_units else "f16"
    return (
        Contender("ours", OURS, "bf16", "folder", torch_runs, _ALL),
        Contender("ours, full KV", OURS, "bf16", "folder", torch_runs, options={"kv": "full"}, full_kv=True),
        Contender("ours, the file as it is", OURS, "bf16", "file", f"{dtype} from Q4_1", ("context",)),
        *(
            Contender(
                f"transformers, {words}",
                "transformers",
                "bf16",
                "folder",
                torch_runs,
                parts,
                {"way": way, "dtype": dtype},
            )
            for way, words, parts in (
                ("stock", "DynamicCache", ("decode", "context")),
                ("masked", "DynamicCache, explicit mask", _ALL),
                ("static", "StaticCache", ("decode",)),
            )
        ),
        Contender("llama.cpp, 16 bit", "llamacpp", "bf16", gguf, f"{gguf} weights, f16 KV", _ALL, room),
        Contender("llama.cpp, Q8_0", "llamacpp", "int8", "q8_0", "Q8_0 weights, f16 KV", ("decode",), room),
        Contender("llama.cpp, Q4_1", "llamacpp", "int4", "file", "Q4_1 weights, f16 KV", ("decode", "context"), room),
        Contender("llama.cpp wheel, Q4_1", "xllamacpp", "int4", "file", "Q4_1, f16 KV", ("decode", "context"), room),
        Contender("vLLM", "vllm", "bf16", "folder", torch_runs, (*_ALL, "context"), room | {"dtype": dtype}),
        Contender("OpenVINO, 16 bit", "openvino", "bf16", "openvino-16", f"f16 weights, {kv} KV", options={"kv": kv}),
        Contender(
            "OpenVINO, 16 bit, u8 KV",
            "openvino",
            "bf16",
            "openvino-16",
            "f16 weights, u8 KV",
            (*_ALL, "context"),
            {"kv": "u8"},
        ),
        Contender("OpenVINO, int8", "openvino", "int8", "openvino-8", "int8 weights, u8 KV", options={"kv": "u8"}),
        Contender("OpenVINO, int4", "openvino", "int4", "openvino-4", "int4 weights, u8 KV", options={"kv": "u8"}),
    )
