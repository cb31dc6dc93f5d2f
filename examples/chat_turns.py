"""A conversation. Each turn finds the turns before it in the cache, so only the new words are computed."""

import os

from ktransformer2 import LLM, SamplingParams

TURNS = ("Name one clause that every lease should have.", "Why that one?", "Write it in one sentence.")


def main() -> None:
    model = os.environ.get("KTRANSFORMER_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
    with LLM(model, memory="2GB") as llm:
        messages: list[dict[str, str]] = []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            output = llm.chat(messages, SamplingParams(max_new_tokens=96))
            messages.append({"role": "assistant", "content": output.text})
            usage = output.usage
            print(f"> {turn}\n{output.text.strip()}")
            print(f"  [{usage.prompt_tokens} tokens in, {usage.cached_tokens} of them cached]\n")


if __name__ == "__main__":
    main()
