"""A short workload for an engine without a model: the counters it leaves behind show what the settings do.

Eight documents are read, and each is asked about in three rounds; a round's requests come together. Nothing is written
into the pages and every token is 0, so that it takes a second. Knows no weights.
"""

from __future__ import annotations

import torch

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.engine.snapshot import Snapshot
from ktransformer2.layout import Form, LayerGroup, ModelGeometry
from ktransformer2.models.batch import FlatBatch

# Room for all of it many times over: what is shown is the working of the knobs, not a want of memory.
MEMORY_BYTES = 64 * 10**6
_DOCUMENTS, _ROUNDS = 8, 3
_DOCUMENT_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 1500, 40, 32


class _Silent:
    """A model of two small layers that computes nothing."""

    geometry = ModelGeometry((LayerGroup((0, 1), 1, 32, 32),), Form.FP32, 8192, (None,))
    fingerprint = b"exercise"
    vocab_size = 4096
    weight_bytes = 0

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        return torch.zeros(len(batch.logit_rows), self.vocab_size)


def exercise(cache_config: CacheConfig, engine_config: EngineConfig) -> Snapshot:
    """The counters after the workload; `cache_config.memory_bytes` should be `MEMORY_BYTES`."""
    model = _Silent()
    cache = KVCache(model.geometry, cache_config, model.fingerprint)
    engine = Engine(model, cache, config=engine_config)
    params = SamplingParams(max_new_tokens=_ANSWER_TOKENS, ignore_eos=True)
    for turn in range(_ROUNDS):
        for number in range(_DOCUMENTS):
            while not engine.has_queue_room:
                engine.step()
            document = [(17 * i + 101 * number) % model.vocab_size for i in range(_DOCUMENT_TOKENS)]
            question = [(31 * i + 7 * turn) % model.vocab_size for i in range(_QUESTION_TOKENS)]
            engine.add(document + question, params)
        while engine.has_work:
            engine.step()
    snapshot = Snapshot(cache.stats(), engine.stats())
    engine.close()
    cache.close()
    return snapshot
