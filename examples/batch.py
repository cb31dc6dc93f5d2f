"""Many prompts at once. They share what they have in common: the instruction is computed once and found by the rest."""

import os

from ktransformer2 import LLM, SamplingParams

INSTRUCTION = (
    "You are a careful reader of contracts. Answer in one sentence, name the clause, and say plainly when the text "
    "does not answer the question. Text: The tenant pays rent on the first day of each month. Repairs above 500 euros "
    "are borne by the landlord. Either party may end this lease with three months' notice. Question: "
)
QUESTIONS = ("When is the rent due?", "Who pays for a new roof?", "How long is the notice?")


def main() -> None:
    model = os.environ.get("KTRANSFORMER_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
    with LLM(model, memory="2GB") as llm:
        first, *rest = [INSTRUCTION + question for question in QUESTIONS]
        params = SamplingParams(max_new_tokens=24)
        outputs = llm.generate(first, params) + llm.generate(rest, params)
        for question, output in zip(QUESTIONS, outputs, strict=True):
            print(f"{question} {output.text.strip()!r}")
            print(f"  {output.usage.cached_tokens} of {output.usage.prompt_tokens} tokens were in the cache")


if __name__ == "__main__":
    main()
