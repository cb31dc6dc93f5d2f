"""What a model takes beside its cache: weights, and what one step needs for a while.

From shapes alone, so that a hollow model and a loaded one give the same numbers.

Of a step's activations the widest moment of one layer counts, since layers follow each other: five rows of the hidden
size (residual, its normed copies, attention's in and out), three of the widest projection (gate, up and their product),
and a row's share of the experts it is sent to. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ktransformer2.models.hf import HFModel
from ktransformer2.models.independence import can_choose_logits
from ktransformer2.models.probe import text_config

_HIDDEN_COPIES, _WIDEST_COPIES = 5, 3
# A tokenizer keeps its entries and merges as Python and as Rust objects: 890 to 900 bytes an entry, measured with
# 49,000 and with 150,000 entries.
_VOCABULARY_ENTRY_BYTES = 900
# Sampling one answer from a temperature: fp64 values, their sorted copies and sums.
_SAMPLING_BYTES = 4 * 8


@dataclass(frozen=True)
class ModelFootprint:
    """Bytes: `row_bytes` of activations for one token of a step, `logit_row_bytes` of one row of logits with its fp32
    copy. `chooses_logits`: only the last row of a sequence has logits, else every row of a step.
    """

    weight_bytes: int
    row_bytes: int
    logit_row_bytes: int
    vocab_size: int
    chooses_logits: bool

    @classmethod
    def of(cls, model: HFModel) -> ModelFootprint:
        inner = model.model
        element, copy = inner.dtype.itemsize, 4 if inner.dtype != torch.float32 else 0
        return cls(
            weight_bytes=model.weight_bytes,
            row_bytes=_row_elements(inner) * element,
            logit_row_bytes=model.vocab_size * (element + copy),
            vocab_size=model.vocab_size,
            chooses_logits=can_choose_logits(inner),
        )

    @property
    def vocabulary_bytes(self) -> int:
        """What the tokenizer takes, about."""
        return self.vocab_size * _VOCABULARY_ENTRY_BYTES

    def step_bytes(self, num_rows: int, num_sequences: int) -> int:
        """What a step of `num_rows` tokens of `num_sequences` texts needs until it is done."""
        num_logit_rows = min(num_sequences, num_rows) if self.chooses_logits else num_rows
        logits = num_logit_rows * self.logit_row_bytes + self.vocab_size * _SAMPLING_BYTES
        return num_rows * self.row_bytes + logits


def _row_elements(model: PreTrainedModel) -> int:
    """Elements that one row has at the widest moment of a layer."""
    config = text_config(model.config)
    shapes = list(_projections(model))
    hidden = int(config.hidden_size)
    widest = max((max(shape) for shape in shapes if len(shape) == 2), default=hidden)
    expert = max((max(shape[1:]) for shape in shapes if len(shape) == 3), default=0)
    experts = _WIDEST_COPIES * expert * int(getattr(config, "num_experts_per_tok", None) or 1)
    return _HIDDEN_COPIES * hidden + _WIDEST_COPIES * widest + experts


def _projections(model: PreTrainedModel) -> Iterator[torch.Size]:
    """Shapes of all weights but the tables from tokens to rows and from rows to logits."""
    head: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # unannotated there
    tables = {id(module.weight) for module in (model.get_input_embeddings(), head) if module is not None}
    for module in model.modules():
        if not isinstance(module, torch.nn.Embedding):
            yield from (p.shape for p in module.parameters(recurse=False) if p.ndim >= 2 and id(p) not in tables)
