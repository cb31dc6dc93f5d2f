"""What a step needs, from shapes: by hand for known ones, and never less than what a real pass holds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ktransformer2.models.footprint import ModelFootprint
from ktransformer2.models.hf import HFModel
from ktransformer2.models.independence import pass_row
from tests.models.tiny import tiny

NUM_ROWS = 256


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """The most bytes that tensors made inside the block held at once."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._live: dict[int, Any] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._weights:
                storage = leaf.untyped_storage()
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                self._live[storage._cdata] = weak, storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._live.values()))
        return out


class Zero:
    def attend(self, call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])

    def mask(self, request: Any) -> None: ...


def test_a_llama_by_hand() -> None:
    """Hidden size 64, the widest projection 96, fp32; 211 logits."""
    model = HFModel(tiny("llama"), weights_hash=b"")
    footprint = ModelFootprint.of(model)
    assert footprint == ModelFootprint(model.weight_bytes, (5 * 64 + 3 * 96) * 4, 211 * 4, 211, chooses_logits=True)
    assert footprint.step_bytes(100, 3) == 100 * 2432 + 3 * 844 + 211 * 32
    assert footprint.vocabulary_bytes == 211 * 900


def test_bfloat16_halves_rows_and_copies_logits() -> None:
    footprint = ModelFootprint.of(HFModel(tiny("llama", dtype=torch.bfloat16), weights_hash=b""))
    assert (footprint.row_bytes, footprint.logit_row_bytes) == ((5 * 64 + 3 * 96) * 2, 211 * (2 + 4))


def test_a_row_goes_to_several_experts() -> None:
    """Two of four experts, whose fused projections are 192 wide: gate and up."""
    dense, experts = (ModelFootprint.of(HFModel(tiny(family), weights_hash=b"")) for family in ("llama", "mixtral"))
    assert experts.row_bytes == (5 * 64 + 3 * 64 + 3 * 192 * 2) * 4
    assert dense.row_bytes < experts.row_bytes


def test_a_model_that_gives_all_logits_needs_them_for_every_row() -> None:
    footprint = ModelFootprint(0, 10, 1000, 100, chooses_logits=False)
    assert footprint.step_bytes(50, 2) == 50 * 10 + 50 * 1000 + 100 * 32


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3", "smollm3", "olmo2", "mixtral", "gpt_neox"])
def test_a_real_pass_holds_about_that_much(family: str) -> None:
    model = HFModel(tiny(family, hidden_size=256, intermediate_size=768, head_dim=64), weights_hash=b"")
    ids = torch.arange(NUM_ROWS) % 211
    gc.collect()
    with Held(model.model) as held:
        pass_row(model.model, ids, torch.arange(NUM_ROWS) % 200, Zero(), num_logits=1)
    told = ModelFootprint.of(model).step_bytes(NUM_ROWS, 1)
    assert 0.95 <= told / held.peak_bytes <= 1.75, (told, held.peak_bytes)
