"""Watch the memory of the cache: it grows with a text, stays while it may be asked for again, and is given back."""

import os

from ktransformer2 import LLM, SamplingParams


def main() -> None:
    model = os.environ.get("KTRANSFORMER_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
    with LLM(model, memory="1GB", max_step_tokens=128) as llm:

        def held() -> str:
            return f"{llm.cache.stats().committed_bytes / 1e6:8.2f} MB"

        print(f"{held()}  before")
        for chunk in llm.stream("The parties agree as follows. " * 40, SamplingParams(max_new_tokens=8)):
            if chunk.prefill is not None:
                print(f"{held()}  {chunk.prefill[0]} of {chunk.prefill[1]} tokens read")
        print(f"{held()}  answered; the blocks are kept for a next question")
        freed = llm.cache.clear()
        print(f"{held()}  cleared, {freed / 1e6:.2f} MB were given back")


if __name__ == "__main__":
    main()
