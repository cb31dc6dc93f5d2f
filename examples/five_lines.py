"""From import to a streamed answer in five lines. KTRANSFORMER_MODEL names another model."""

import os

from ktransformer2 import LLM, SamplingParams

llm = LLM(os.environ.get("KTRANSFORMER_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct"), memory="4GB")
for chunk in llm.stream("A contract is", SamplingParams(max_new_tokens=32)):
    print(chunk.text, end="", flush=True)
print()
