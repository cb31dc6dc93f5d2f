"""KTransformer2: a dynamic KV cache for transformers. Memory that follows the text.

    from ktransformer2 import LLM, SamplingParams

    llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct", memory="4GB")
    for chunk in llm.stream("The tenant shall", SamplingParams(max_new_tokens=32)):
        print(chunk.text, end="", flush=True)

Names are loaded when they are first used, so that importing the package costs no torch. A name that was renamed goes on
working, with a DeprecationWarning, for one release.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktransformer2.config import CacheConfig, EngineConfig, TierConfig
    from ktransformer2.engine.llm import LLM
    from ktransformer2.engine.outputs import RequestOutput, StreamChunk
    from ktransformer2.engine.sampling import SamplingParams
    from ktransformer2.errors import KTransformerError
    from ktransformer2.integrations.attach import attach
    from ktransformer2.integrations.transformers_cache import DynamicKVCache

__version__ = "0.1.0"

_HOMES = {
    "CacheConfig": "ktransformer2.config",
    "DynamicKVCache": "ktransformer2.integrations.transformers_cache",
    "EngineConfig": "ktransformer2.config",
    "KTransformerError": "ktransformer2.errors",
    "LLM": "ktransformer2.engine.llm",
    "RequestOutput": "ktransformer2.engine.outputs",
    "SamplingParams": "ktransformer2.engine.sampling",
    "StreamChunk": "ktransformer2.engine.outputs",
    "TierConfig": "ktransformer2.config",
    "attach": "ktransformer2.integrations.attach",
}
# Old name -> the new one, and the version that no longer has the old one.
_RENAMED: dict[str, tuple[str, str]] = {}

__all__ = [
    "LLM",
    "CacheConfig",
    "DynamicKVCache",
    "EngineConfig",
    "KTransformerError",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "TierConfig",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        old, (name, end) = name, _RENAMED[name]
        warnings.warn(f"{__name__}.{old} is {name} now; {end} has only that", DeprecationWarning, stacklevel=2)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
