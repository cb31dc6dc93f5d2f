"""The linear layers of SmolLM2 in every form of weights: time per pass beside torch, and what a form costs in quality.

A pass multiplies rows by the weights of all 30 layers and of the output, so that no cache holds them (512 rows: those
of three layers, since arithmetic bounds them). Q, K and V are stacked, and gate and up. Weights are random. Rivals:
    torch_fp32, torch_bf16   torch's own linear layer in that type
    torch_int8, torch_int4   its packed products `_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu` (groups of 32)
    read                     a plain read of a buffer larger than any cache: the bandwidth of the same rounds
Quality: next-token predictions on WikiText-2 with every linear layer in a form, beside the file unpacked into fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ktransformer2.bench import int8_quality
from ktransformer2.bench.corpus import text_of
from ktransformer2.bench.int8_quality import Quality
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.rounds import interleaved, ratio, spread
from ktransformer2.bench.threads import torch_threads
from ktransformer2.models.packing import Packer, packed_tensors

PARTS = ("speed", "quality")
THREADS = 2
FORMS = ("bf16", "int8", "int4")
_LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, o, gate and up, down: outputs, inputs
_OUTPUT = (49_152, 576)
_NUM_LAYERS, _MANY_LAYERS = 30, 3  # what many rows are bound by is arithmetic: fewer layers show the same
_MANY = 512
_GROUP = 32
_READ_BYTES = 512 * 2**20
_TORCH = ("torch_fp32", "torch_bf16", "torch_int8", "torch_int4")
Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to hold the weights: its layers, and the bytes one row makes them read."""

    layers: list[tuple[int, Layer]]  # (inputs, layer)
    num_bytes: int
    dtype: torch.dtype = torch.float32

    def passing(self, num_rows: int) -> Callable[[], None]:
        """A pass of so many rows. Rows are drawn once: what they hold does not change the time."""
        rows = {size: torch.randn(num_rows, size).to(self.dtype) for size, _ in self.layers}

        def run() -> None:
            for size, layer in self.layers:
                layer(rows[size])

        return run


def _shapes(num_rows: int) -> list[tuple[int, int]]:
    """Every weight of the model; for many rows those of a few layers: a prompt needs only its last row's output."""
    return [*_LAYER * _NUM_LAYERS, _OUTPUT] if num_rows < _MANY else [*_LAYER * _MANY_LAYERS]


def _ours(form: str, shapes: Sequence[tuple[int, int]]) -> Contender:
    packer = Packer(form)
    layers = [packer(torch.randn(shape) / 10) for shape in shapes]
    return Contender([(layer.in_features, layer) for layer in layers], sum(layer.weight_bytes for layer in layers))


def _torch(name: str, shapes: Sequence[tuple[int, int]]) -> Contender:
    dtype = torch.float32 if name == "torch_fp32" else torch.bfloat16
    made = [_torch_layer(name, torch.randn(shape) / 10) for shape in shapes]
    layers = [(inputs, layer) for (_, inputs), (layer, _) in zip(shapes, made, strict=True)]
    return Contender(layers, sum(num_bytes for _, num_bytes in made), dtype)


def _torch_layer(name: str, weight: torch.Tensor) -> tuple[Layer, int]:
    """torch's product with a weight held as `name` says, and the bytes it reads."""
    if name == "torch_int8":
        scales = (weight.abs().amax(1) / 127).bfloat16()
        codes = (weight / scales.float()[:, None]).round().to(torch.int8)
        return partial(_swapped, torch._weight_int8pack_mm, codes, scales), codes.nbytes + scales.nbytes
    if name == "torch_int4":
        codes = torch.randint(0, 16, weight.shape, dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.rand(weight.shape[1] // _GROUP, weight.shape[0], 2).bfloat16()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        return lambda x: product(x, packed, _GROUP, scales), packed.nbytes + scales.nbytes
    held = weight if name == "torch_fp32" else weight.bfloat16()
    return lambda x: torch.nn.functional.linear(x, held), held.nbytes


def _swapped(
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    codes: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
) -> torch.Tensor:
    return product(x, codes, scales)


def _speed(num_rows: int, rounds: int, seed: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    shapes = _shapes(num_rows)
    contenders = {form: _ours(form, shapes) for form in FORMS} | {name: _torch(name, shapes) for name in _TORCH}
    buffer = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    calls: dict[str, Callable[[], object]] = {name: each.passing(num_rows) for name, each in contenders.items()}
    say(f"{num_rows} rows: {rounds} rounds of {', '.join(calls)}")
    seconds = interleaved({**calls, "read": buffer.sum}, rounds, seed)
    best = min(_TORCH, key=lambda name: spread(seconds[name]).median)
    rows: list[dict[str, object]] = []
    summary: dict[str, float] = {}
    for name, each in contenders.items():
        pairs = zip(seconds[name], seconds["read"], strict=True)
        share = spread([each.num_bytes / own / (_READ_BYTES / read) for own, read in pairs])
        rows.append(
            {
                "part": f"{len(shapes)} linear layers, {num_rows} rows",
                "contender": name,
                "mb": each.num_bytes / 1e6,
                **spread(seconds[name]).as_row("ms", 1000.0),
                "share_of_read": share.median,
                "times_torch_best": ratio(seconds[best], seconds[name]).median,
            }
        )
        if name in FORMS:
            summary[f"{name}_vs_torch_{num_rows}"] = ratio(seconds[best], seconds[name]).median
            if num_rows == 1:
                summary[f"{name}_read_share"] = share.median
    return rows, summary


def _layers_of(model: torch.nn.Module, place: Path, form: str) -> dict[torch.nn.Module, Layer]:
    """For every linear layer of the model one over the file's weights in `form`."""
    tensors = packed_tensors(place, form)
    return {
        module: tensors.layer(name if f"{name}.weight" in tensors else "model.embed_tokens")  # tied to the output
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


@contextmanager
def _instead(layers: Mapping[torch.nn.Module, Layer]) -> Iterator[None]:
    """The modules multiply by other weights, for as long as it lasts."""
    for module, layer in layers.items():
        module.forward = lambda x, layer=layer: layer(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
    try:
        yield
    finally:
        for module in layers:
            del module.forward


def _logits(model: torch.nn.Module, window: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(window[:-1])]), use_cache=False).logits[0].float()
    return logits


def _quality(options: BenchOptions) -> tuple[list[dict[str, object]], dict[str, float]]:
    from ktransformer2.bench.subject import load_subject  # imports transformers
    from ktransformer2.models.demo import smollm2_from_wheel
    from ktransformer2.models.store import cache_directory

    place = Path(options.model) if options.model else smollm2_from_wheel(cache_directory())
    loaded = load_subject(options, "fp32")
    windows = int8_quality.windows_of(loaded.tokenizer.encode(text_of("wikitext")), 1 if options.quick else 8)
    qualities = {form: Quality(int8_quality.WINDOW_TOKENS) for form in FORMS}
    say(f"packing the weights as {', '.join(FORMS)}")
    layers = {form: _layers_of(loaded.model.model, place, form) for form in FORMS}
    for count, window in enumerate(windows, 1):
        say(f"window {count} of {len(windows)}: fp32 and {', '.join(FORMS)}")
        window = window[:257] if options.quick else window
        with loaded.model.original_attention() as model:
            exact = _logits(model, window)
            for form, quality in qualities.items():
                with _instead(layers[form]):
                    quality.add(exact, _logits(model, window), torch.tensor(window[1:]))
    rows: list[dict[str, object]] = [
        {
            "part": f"next-token predictions on WikiText-2, {loaded.source}",
            "form": form,
            "predictions": quality.count,
            "ppl_fp32": quality.ppl_full,
            "ppl_ratio": quality.ppl_ratio,
            "kl": quality.mean_kl,
            "top1": quality.top1_share,
        }
        for form, quality in qualities.items()
    ]
    return rows, {f"ppl_ratio_{form}": quality.ppl_ratio for form, quality in qualities.items()}


def run(options: BenchOptions) -> Outcome:
    """Passes of 1, 8 and 512 rows in every form, and perplexities."""
    rows: list[dict[str, object]] = []
    summary: dict[str, float] = {}
    torch.manual_seed(options.seed)
    with torch_threads(THREADS):
        if options.wants("speed"):
            for num_rows, rounds in ((1, 20), (8, 10), (_MANY, 5)):
                more, figures = _speed(num_rows, 3 if options.quick else rounds, options.seed)
                rows += more
                summary |= figures
        if options.wants("quality"):
            more, figures = _quality(options)
            rows += more
            summary |= figures
    return Outcome(rows, summary, {"threads": THREADS, "layers": _NUM_LAYERS, "layers_512_rows": _MANY_LAYERS})
