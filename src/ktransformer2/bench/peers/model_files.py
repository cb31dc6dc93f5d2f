"""One model in the form that each peer reads, made once from a GGUF file and kept beside the environments.

    file            the GGUF file itself
    folder          its unpacked weights in bf16, as transformers saves them
    f16 bf16 q8_0   a GGUF file again, its matrices rewritten in that type from the unpacked ones
    openvino-16 -8 -4    OpenVINO's form with f16, int8 or int4 weights, written by the peer's own environment

So every peer computes with the same weights as far as its width lets it. Forms appear whole (by rename) or not at all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import gguf
import torch

from ktransformer2.bench.outcome import say
from ktransformer2.bench.peers.environments import peers_directory, python_of
from ktransformer2.bench.peers.process import PeerError
from ktransformer2.models.fingerprint import hash_file
from ktransformer2.models.gguf_conversion import converted
from ktransformer2.models.store import hash_memory

_REWRITTEN = {
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_CONVERTER = Path(__file__).parent / "workers" / "openvino_model.py"
_CONVERTING_S, _LAST_WORDS = 900.0, 600


def model_in(form: str, source: Path) -> Path:
    """The model of the GGUF file `source` in that form. Side effect: writes it the first time.

    Raises: PeerError where the peer that has to write it cannot.
    """
    if form == "file":
        return source
    folder = converted(source, torch.bfloat16)
    if form == "folder":
        return folder
    models = peers_directory() / "models"
    target = models / f"{hash_file(source, hash_memory()).hex()[:16]}-{form}{'.gguf' if form in _REWRITTEN else ''}"
    if target.exists():
        return target
    say(f"writing {target.name}")
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".unfinished-") as unfinished:
        place = Path(unfinished) / target.name
        if form in _REWRITTEN:
            rewrite(source, place, _REWRITTEN[form])
        else:
            _convert_for_openvino(folder, place, form.removeprefix("openvino-"))
        shutil.move(place, target)
    return target


def rewrite(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The same model with all matrices of one type; vectors stay in fp32."""
    reader = gguf.GGUFReader(source)
    (architecture,) = (field.contents() for name, field in reader.fields.items() if name == "general.architecture")
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        rows = gguf.dequantize(tensor.data, tensor.tensor_type)
        own = kind if rows.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(rows, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _convert_for_openvino(folder: Path, target: Path, bits: str) -> None:
    command = [str(python_of("openvino")), "-P", str(_CONVERTER), str(folder), str(target), bits]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    offline.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_CONVERTING_S, env=offline)
    if done.returncode:
        raise PeerError(f"the model is not converted: {' '.join(done.stderr[-_LAST_WORDS:].split())}")
