"""The least that can stand in for a KV cache: blocks are handed out in order and never given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ktransformer2.kernels.batch import KVBatch
from ktransformer2.layout import EXTENT_ALIGNMENT, ExtentLayout, LayerGroup, ModelGeometry
from ktransformer2.models.batch import CausalModel, FlatBatch

BLOCK_TOKENS = 16


@dataclass
class Text:
    """One sequence: tokens already stored, and its block ids per layer group."""

    num_tokens: int
    blocks: list[list[int]]
    tokens: list[int] = field(default_factory=list)


class PagedTexts:
    """Pages in full form for a few sequences of one model."""

    def __init__(self, geometry: ModelGeometry, num_blocks: int = 64) -> None:
        self.geometry = geometry
        layouts = [ExtentLayout.uniform(group, BLOCK_TOKENS, geometry.full_form) for group in geometry.groups]
        self._memory = [
            torch.zeros(num_blocks * it.extent_bytes + EXTENT_ALIGNMENT, dtype=torch.uint8) for it in layouts
        ]
        self._page_tables = []
        for memory, layout in zip(self._memory, layouts, strict=True):
            start = -(-memory.data_ptr() // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT
            rows = [layout.entries(start + block * layout.extent_bytes) for block in range(num_blocks)]
            self._page_tables.append(torch.tensor(rows, dtype=torch.int64))
        self._next_block = 0

    def new_text(self) -> Text:
        return Text(0, [[] for _ in self.geometry.groups])

    def step(self, new: Sequence[tuple[Text, Sequence[int]]]) -> FlatBatch:
        """The flat batch that adds these tokens to these texts; logits are asked for at each text's last token."""
        for text, tokens in new:
            while len(text.blocks[0]) * BLOCK_TOKENS < text.num_tokens + len(tokens):
                for blocks in text.blocks:
                    blocks.append(self._next_block)
                self._next_block += 1
        ends = torch.tensor([len(tokens) for _, tokens in new]).cumsum(0)
        kv = tuple(self._kv_batch(g, group, new) for g, group in enumerate(self.geometry.groups))
        batch = FlatBatch(
            token_ids=torch.tensor([token for _, tokens in new for token in tokens]),
            positions=torch.tensor([text.num_tokens + i for text, tokens in new for i in range(len(tokens))]),
            kv=kv,
            logit_rows=ends - 1,
        )
        for text, tokens in new:
            text.num_tokens += len(tokens)
            text.tokens.extend(tokens)
        return batch

    def _kv_batch(self, g: int, group: LayerGroup, new: Sequence[tuple[Text, Sequence[int]]]) -> KVBatch:
        slots, starts, contexts, entry_starts, entries = [], [0], [], [0], []
        for text, tokens in new:
            for i in range(text.num_tokens, text.num_tokens + len(tokens)):
                slots.append(text.blocks[g][i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS)
            total = text.num_tokens + len(tokens)
            for at, block in enumerate(text.blocks[g]):
                entries.append((block, 0, min(BLOCK_TOKENS, total - at * BLOCK_TOKENS), 0))
            starts.append(len(slots))
            contexts.append(text.num_tokens)
            entry_starts.append(len(entries))
        return KVBatch(
            group=group,
            block_tokens=BLOCK_TOKENS,
            page_table=self._page_tables[g],
            open_table=torch.zeros_like(self._page_tables[g]),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            entry_starts=torch.tensor(entry_starts, dtype=torch.int32),
            entries=torch.tensor(entries, dtype=torch.int32).view(-1, 4),
            seals=torch.zeros(0, 2, dtype=torch.int32),
        )


def greedy(model: CausalModel, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Greedy continuations of all prompts in one ragged batch: whole prompts first, then one token each."""
    texts = PagedTexts(model.geometry)
    step = [(texts.new_text(), list(prompt)) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_new):
        chosen = model.forward(texts.step(step)).argmax(-1).tolist()
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
        step = [(text, [token]) for (text, _), token in zip(step, chosen, strict=True)]
    return answers
