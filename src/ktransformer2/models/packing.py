"""Linear layers over weights that stay packed in memory: int8 or int4 codes, or the file's own fp16, bf16 or fp32.

A decode step reads every weight once, so its time is bytes over bandwidth. What was packed once is multiplied as it is
(`kernels.linear`). A layer is called with rows
x [T, in_features] and returns [T, out_features] in x's dtype; `weight_bytes` is what one row makes it read.

Knows no architecture: `PackedTensors` stacks rows of tensors by name, what they mean is for the caller to know.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ktransformer2.errors import ConfigError, ModelFileError
from ktransformer2.kernels.linear import CodedWeights, PackedMatrix, multiply, multiply_dense, pack, tiles_shape
from ktransformer2.layout import round_up
from ktransformer2.memory.mapping import MappedFiles, huge_page_bytes
from ktransformer2.models.gguf_weights import GgufWeights, Weight, quantized
from ktransformer2.models.weight_files import checked_weights, stored_tensors

WEIGHT_FORMS = ("auto", "bf16", "int8", "int4")
_DTYPE_OF = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FORM_OF = {dtype: name for name, dtype in _DTYPE_OF.items()}
# Rows of the output layer weigh most in what is predicted: int4 leaves them at int8 unless the file has them in 4 bits.
_OUTPUT_LAYERS = ("lm_head", "model.embed_tokens")
_FORM_IN_FILES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_CHUNK_BYTES = 64 * 2**20
_ALIGNMENT = 64


class PackedLinear:
    """A linear layer over int8 or int4 codes."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self.in_features, self.out_features = matrix.num_inputs, matrix.num_outputs
        self.weight_bytes = matrix.tiles.nbytes + (0 if matrix.bias is None else matrix.bias.nbytes)

    @property
    def form(self) -> str:
        return self.matrix.form

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The weights of the outputs `index` [n], fp32 [n, in_features]."""
        return self.matrix.coded_rows(index).values()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.matrix)


class DenseLinear:
    """A linear layer over weights in fp32, bf16 or fp16, as they are; bias in fp32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    @property
    def form(self) -> str:
        return _FORM_OF[self.weight.dtype]

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The weights of the outputs `index` [n], fp32 [n, in_features]."""
        return self.weight[index].float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply_dense(x, self.weight, self.bias)


class WeightMemory:
    """Memory for weights in few large pieces, in huge pages where the system has them: fewer misses of the TLB."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, int]) -> torch.Tensor:
        """uint8 of `shape`, on a 64-byte boundary. Its pages cost nothing until they are written."""
        num_bytes = shape[0] * shape[1]
        if round_up(num_bytes, _ALIGNMENT) > self._free.numel():
            self._free = _huge_piece(max(num_bytes, _CHUNK_BYTES))
        taken = self._free[:num_bytes].view(shape)
        self._free = self._free[round_up(num_bytes, _ALIGNMENT) :]
        return taken


def _huge_piece(num_bytes: int) -> torch.Tensor:
    huge = huge_page_bytes()
    piece = mmap.mmap(-1, round_up(num_bytes, _ALIGNMENT) + huge)
    if huge:
        piece.madvise(mmap.MADV_HUGEPAGE)
    bytes_ = torch.frombuffer(piece, dtype=torch.uint8)
    return bytes_[-bytes_.data_ptr() % huge :] if huge else bytes_


class Packer:
    """Makes linear layers in one form, their weights beside each other in memory. Called as `make(weight, bias)`."""

    def __init__(self, form: str) -> None:
        """`form`: auto keeps what a weight comes in, else bf16, int8 or int4. Raises ConfigError."""
        if form not in WEIGHT_FORMS:
            raise ConfigError(f"weights={form!r} is not allowed; allowed: {', '.join(WEIGHT_FORMS)}")
        self.form = form
        self._memory = WeightMemory()

    def __call__(self, weight: Weight, bias: torch.Tensor | None = None) -> PackedLinear | DenseLinear:
        """A layer of a weight [N, K] and a bias [N]. Raises ModelError for a weight that cannot be packed."""
        return self.layer(as_form(weight, self.form), bias)

    def layer(self, weight: Weight, bias: torch.Tensor | None = None) -> PackedLinear | DenseLinear:
        """A layer of a weight in the form it has."""
        numbers = None if bias is None else bias.float().contiguous()
        if isinstance(weight, torch.Tensor):
            return DenseLinear(weight.contiguous(), numbers)
        tiles = self._memory.take(tiles_shape(weight.form, weight.num_outputs, weight.num_inputs))
        return PackedLinear(pack(weight, tiles, numbers))


def as_form(weight: Weight, form: str) -> Weight:
    """The weight in a form of WEIGHT_FORMS; what it has already is handed back as it is."""
    if form in ("auto", _own_form(weight)):
        return weight
    dense = weight.values() if isinstance(weight, CodedWeights) else weight
    if form in _DTYPE_OF:
        return dense.to(_DTYPE_OF[form])
    return quantized(dense, "int8" if form == "int8" else "int4")


def _own_form(weight: Weight) -> str:
    return weight.form if isinstance(weight, CodedWeights) else _FORM_OF[weight.dtype]


def _form_of(asked: str, own: str, name: str) -> str:
    """What a weight of this name becomes, that is held as `own`: asked for are auto, bf16, int8 or int4."""
    if asked == "auto":
        return own
    return "int8" if asked == "int4" and name in _OUTPUT_LAYERS and own != "int4" else asked


def _stacked_form(forms: Collection[str]) -> str:
    """The form of rows that come in these ones."""
    if not {"int8", "int4"}.issuperset(forms):
        return next(iter(forms)) if len(set(forms)) == 1 else "fp32"
    return "int8" if "int8" in forms else "int4"


def form_among(asked: str, own: Callable[[str], str], *names: str) -> str:
    """The form of a layer of all of `names`, which are held as `own` says."""
    return _stacked_form({_form_of(asked, own(name), name) for name in names})


def matrix_bytes(form: str, num_outputs: int, num_inputs: int) -> int:
    """Bytes of a layer's weights in int8, int4, fp32, bf16 or fp16."""
    if form == "int8" or form == "int4":
        tiles, tile_bytes = tiles_shape("int8" if form == "int8" else "int4", num_outputs, num_inputs)
        return tiles * tile_bytes
    return num_outputs * num_inputs * _DTYPE_OF[form].itemsize


def stacked(weights: Sequence[Weight]) -> Weight:
    """The rows of several weights one under the other. Where their forms differ, in one that holds them all."""
    form = _stacked_form({_own_form(weight) for weight in weights})
    alike = [as_form(weight, form) for weight in weights]
    coded = [weight for weight in alike if isinstance(weight, CodedWeights)]
    if not coded:
        return torch.cat([weight for weight in alike if isinstance(weight, torch.Tensor)])
    codes, scales = torch.cat([weight.codes for weight in coded]), torch.cat([weight.scales for weight in coded])
    return CodedWeights(coded[0].form, coded[0].num_inputs, codes, scales)


class Stored(Protocol):
    """Tensors of a model on disk, by their names in transformers."""

    def __contains__(self, name: str) -> bool: ...

    def weight(self, name: str) -> Weight:
        """Raises ModelFileError where it is missing."""

    def form(self, name: str) -> str:
        """What `weight` would come in, told without reading it: int8, int4, fp32, bf16 or fp16. Raises as `weight`."""

    def let_go(self, name: str) -> None:
        """The pages of the file that hold it are read; what is still used of them is read again."""


class FolderWeights:
    """The tensors of a model folder: of its safetensors files, each mapped."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelFileError for a folder whose weights are broken or missing."""
        self._folder = folder
        self._open: dict[str, Any] = {}  # name -> a call that reads it
        self._forms: dict[str, str] = {}
        for path in checked_weights(folder):
            try:
                file = safe_open(path, "pt")
            except SafetensorError as error:
                raise ModelFileError(f"{path}: cannot be read ({error}); download it again") from error
            held = stored_tensors(path)
            self._open |= {tensor.name: partial(file.get_tensor, tensor.name) for tensor in held}
            self._forms |= {tensor.name: _FORM_IN_FILES.get(tensor.dtype, tensor.dtype) for tensor in held}
        self._files = MappedFiles()

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def weight(self, name: str) -> torch.Tensor:
        if name not in self._open:
            raise ModelFileError(f"{self._folder}: holds no {name}")
        found: torch.Tensor = self._open[name]()
        return found

    def form(self, name: str) -> str:
        form = self._forms.get(name)
        if form not in _DTYPE_OF:
            raise ModelFileError(f"{self._folder}: {name} is {form or 'missing'}; fp32, bf16 and fp16 are packed")
        return form

    def let_go(self, name: str) -> None:
        tensor = self.weight(name)
        self._files.forget(tensor.data_ptr(), tensor.nbytes)


class PackedTensors:
    """A model's weights as layers in one form, made when they are asked for, and its other tensors."""

    def __init__(self, stored: Stored, form: str) -> None:
        self._stored, self._packer, self.form = stored, Packer(form), form

    def form_of(self, *names: str) -> str:
        """The form in which `layer` would make these. Raises ModelFileError where one is missing."""
        return form_among(self.form, lambda name: self._stored.form(f"{name}.weight"), *names)

    def layer(self, *names: str) -> PackedLinear | DenseLinear:
        """One layer of the rows of `NAME.weight` of all names, one under the other, with `NAME.bias` if they have it.

        Raises ModelFileError where one is missing, only some have a bias, or a bias is not as long as its layer.
        """
        weights = [self._in_form(name) for name in names]
        biased = [name for name in names if f"{name}.bias" in self._stored]
        if biased and len(biased) < len(names):
            raise ModelFileError(f"of {', '.join(names)} only {', '.join(biased)} have a bias")
        rows = stacked(weights)
        bias = torch.cat([self.tensor(f"{name}.bias") for name in names]) if biased else None
        outputs = rows.num_outputs if isinstance(rows, CodedWeights) else rows.shape[0]
        if bias is not None and bias.shape != (outputs,):
            raise ModelFileError(f"the bias of {', '.join(names)} has shape {tuple(bias.shape)}, not ({outputs},)")
        made = self._packer.layer(rows, bias)
        for name in names:
            self._stored.let_go(f"{name}.weight")
        return made

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as numbers: norms, biases, embeddings. Raises ModelFileError where it is missing."""
        found = self._stored.weight(name)
        return found.values() if isinstance(found, CodedWeights) else found

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def _in_form(self, name: str) -> Weight:
        found = self._stored.weight(f"{name}.weight")
        return as_form(found, _form_of(self.form, _own_form(found), name))


def packed_tensors(place: Path, form: str) -> PackedTensors:
    """The weights of a model folder or GGUF file in `form`: auto, bf16, int8 or int4.

    Raises ConfigError, ModelFileError, UnsupportedModelError.
    """
    return PackedTensors(FolderWeights(place) if place.is_dir() else GgufWeights(place), form)
