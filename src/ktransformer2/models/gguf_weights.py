"""The weights of a GGUF file of the Llama family as the file holds them: coded rows stay codes.

Names and the order of rows are those of transformers: llama.cpp's converter interleaves the two halves of every head of
Q and K in files of architecture `llama`, so their rows are put back; a group of codes lies along a row, so it costs no
rounding. Q8_0, Q4_1, Q4_0 and Q4_K come as codes, F32, F16 and BF16 as they are; other kinds are coded anew in int8.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import Q4_K
from torch.nn.functional import pad

from ktransformer2.errors import ModelError, ModelFileError, UnsupportedModelError
from ktransformer2.kernels.linear import GROUP_INPUTS, CodedWeights, PackedForm
from ktransformer2.memory.mapping import MappedFiles
from ktransformer2.models.weight_files import check_gguf

Weight = torch.Tensor | CodedWeights
_QUANTIZED_ELEMENTS = 2**22  # at once: the package makes several fp32 copies of what it codes
# Architecture: whether the rows of Q and K are interleaved.
_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # no weight: what the config's rope says, worked out
_DENSE = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_FORM_OF_DENSE = {Kind.F32: "fp32", Kind.F16: "fp16", Kind.BF16: "bf16"}
_KIND_OF_FORM: dict[PackedForm, Kind] = {"int8": Kind.Q8_0, "int4": Kind.Q4_1}


class GgufWeights:
    """The tensors of one file by their names in transformers. The file stays mapped while this lives."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError for a file that is broken, UnsupportedModelError for another family."""
        check_gguf(path)
        self._path = path
        try:
            self._reader = gguf.GGUFReader(path, mode="c")  # pages are shared until they are written, which nobody does
        except Exception as error:  # whatever a header that is well formed but senseless may set off in the library
            raise ModelFileError(f"{path}: its header cannot be read ({type(error).__name__}: {error})") from error
        self._files = MappedFiles()
        architecture = self._value("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path}: architecture {architecture!r}; weights are packed for {', '.join(_ARCHITECTURES)}"
            )
        self._interleaved = _ARCHITECTURES[architecture]
        heads = self._value(f"{architecture}.attention.head_count")
        kv_heads = self._value(f"{architecture}.attention.head_count_kv", heads)
        self._heads = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
        self._tensors = {
            self._name(tensor.name): tensor for tensor in self._reader.tensors if tensor.name != _ROPE_FACTORS
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def weight(self, name: str) -> Weight:
        """A tensor, [outputs, inputs] or [outputs]. Raises ModelFileError where it is missing or not finite."""
        if name not in self._tensors:
            raise ModelFileError(f"{self._path}: holds no {name}")
        tensor = self._tensors[name]
        found = self._stored(name, tensor)
        heads = next((n for stem, n in self._heads.items() if stem in name), 0)
        if not self._interleaved or not heads:
            return found
        size = int(tensor.shape[-1])
        if not isinstance(heads, int) or heads < 1 or size % (2 * heads):
            raise ModelFileError(f"{self._path}: {name} has {size} rows, which {heads} heads do not divide")
        order = torch.arange(size).view(heads, -1, 2).transpose(1, 2).flatten()
        return found.rows(order) if isinstance(found, CodedWeights) else found[order]

    def form(self, name: str) -> str:
        """What `weight` comes in for a matrix, by its kind alone. Raises ModelFileError where it is missing."""
        if name not in self._tensors:
            raise ModelFileError(f"{self._path}: holds no {name}")
        kind = self._tensors[name].tensor_type
        return _FORM_OF_DENSE.get(kind, "int4" if kind in (Kind.Q4_1, Kind.Q4_0, Kind.Q4_K) else "int8")

    def let_go(self, name: str) -> None:
        """The pages of the file that hold it are not held any more; a touch reads them again."""
        data = self._tensors[name].data
        self._files.forget(data.ctypes.data, data.nbytes)

    def _stored(self, name: str, tensor: gguf.ReaderTensor) -> Weight:
        """The tensor in the file's own order of rows."""
        shape = [int(size) for size in reversed(tensor.shape)]
        raw = torch.from_numpy(tensor.data)
        if tensor.tensor_type in _DENSE:
            return raw.view(_DENSE[tensor.tensor_type]).view(shape)
        if len(shape) == 2 and tensor.tensor_type in _READ:
            return _checked(coded(raw.view(shape[0], -1), tensor.tensor_type, shape[1]), f"{self._path}: {name}")
        try:
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).view(shape)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UnsupportedModelError(f"{self._path}: {name} is {kind}, which gguf cannot unpack") from error
        return quantized(values, "int8", f"{self._path}: {name}") if len(shape) == 2 else values

    def _value(self, key: str, default: object = None) -> object:
        field = self._reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._path}: {key} is not text ({error}); download it again") from error

    def _name(self, name: str) -> str:
        """The name in transformers of a tensor of the file. Raises UnsupportedModelError for one it does not have."""
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".")
        if stem in _WHOLE and kind == "weight":
            return f"{_WHOLE[stem]}.{kind}"
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in _OF_A_LAYER and kind in ("weight", "bias"):
            return f"model.layers.{parts[1]}.{_OF_A_LAYER[parts[2]]}.{kind}"
        raise UnsupportedModelError(f"{self._path}: tensor {name!r} belongs to no plain model of the Llama family")


def quantized(weight: torch.Tensor, form: PackedForm, name: str = "a weight") -> CodedWeights:
    """A weight [N, K] in any floating dtype as codes: Q8_0 for int8, Q4_1 for int4, by the `gguf` package.

    Raises ModelError, which calls it `name`, where it holds NaN or Inf, or values beyond what fp16 scales reach.
    """
    at_once = max(1, _QUANTIZED_ELEMENTS // weight.shape[1])
    if len(weight) > at_once:
        starts = range(0, len(weight), at_once)
        coded_pieces = [quantized(weight[start : start + at_once], form, name) for start in starts]
        codes, scales = (torch.cat([getattr(each, part) for each in coded_pieces]) for part in ("codes", "scales"))
        return CodedWeights(form, weight.shape[1], codes, scales)
    values = pad(weight.float(), (0, -weight.shape[1] % GROUP_INPUTS))
    if not torch.isfinite(values).all():
        raise ModelError(f"{name}: holds NaN or Inf; it cannot be packed")
    kind = _KIND_OF_FORM[form]
    with np.errstate(over="ignore"):  # a scale beyond fp16 is found below
        blocks = torch.from_numpy(gguf.quantize(values.numpy(), kind))
    return _checked(coded(blocks, kind, weight.shape[1]), name)


def coded(blocks: torch.Tensor, kind: Kind, num_inputs: int) -> CodedWeights:
    """GGUF blocks uint8 [N, bytes of a row] as codes and scales: for all but Q4_K the very same numbers."""
    return _READ[kind](blocks, num_inputs)


def _checked(weights: CodedWeights, what: str) -> CodedWeights:
    if not torch.isfinite(weights.scales).all():
        raise ModelFileError(f"{what}: has scales that are not finite; download or convert it again")
    return weights


def _q8_0(blocks: torch.Tensor, num_inputs: int) -> CodedWeights:
    parts = blocks.reshape(len(blocks), -1, 2 + GROUP_INPUTS)
    return CodedWeights("int8", num_inputs, parts[..., 2:], _halves(parts[..., :2]))


def _q4_1(blocks: torch.Tensor, num_inputs: int) -> CodedWeights:
    parts = blocks.reshape(len(blocks), -1, 4 + GROUP_INPUTS // 2)
    return CodedWeights("int4", num_inputs, parts[..., 4:], _halves(parts[..., :4]))


def _q4_0(blocks: torch.Tensor, num_inputs: int) -> CodedWeights:
    parts = blocks.reshape(len(blocks), -1, 2 + GROUP_INPUTS // 2)
    scale = _halves(parts[..., :2])
    return CodedWeights("int4", num_inputs, parts[..., 2:], torch.cat([scale, scale * -8], dim=-1))


def _q4_k(blocks: torch.Tensor, num_inputs: int) -> CodedWeights:
    """Super-blocks of eight groups whose scales are 6-bit numbers times two fp16; here each is rounded to fp16."""
    parts, end = blocks.reshape(len(blocks), -1, 144), 4 + Q4_K.K_SCALE_SIZE
    halves, sixes, nibbles = parts[..., :4], parts[..., 4:end], parts[..., end:]
    scale, least = _halves(halves).float().unsqueeze(-1).unbind(2)  # [N, super-blocks, 1]
    unpacked = Q4_K.get_scale_min(sixes.flatten(0, 1).numpy())
    factors, offsets = (torch.from_numpy(numbers).view(*scale.shape[:2], 8) for numbers in unpacked)
    scales = torch.stack([scale * factors, -least * offsets], dim=-1).half().flatten(1, 2)
    # Two groups share 32 bytes, the first in the low nibbles; here a group has 16, its second half in the high ones.
    pairs = nibbles.view(*nibbles.shape[:2], 4, 2, 16)
    low, high = pairs & 15, pairs >> 4
    groups = torch.stack([low[..., 0, :] | low[..., 1, :] << 4, high[..., 0, :] | high[..., 1, :] << 4], dim=-2)
    return CodedWeights("int4", num_inputs, groups.flatten(1, 3), scales)


def _halves(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.float16)


_READ = {Kind.Q8_0: _q8_0, Kind.Q4_1: _q4_1, Kind.Q4_0: _q4_0, Kind.Q4_K: _q4_k}
