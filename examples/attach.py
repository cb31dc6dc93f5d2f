"""A model of transformers that remembers: plain `generate`, and a prefix that was read once is never read again."""

import os
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

import ktransformer2

name = os.environ.get("KTRANSFORMER_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
lease = "The tenant pays rent on the first day of each month. Repairs are borne by the landlord. " * 40

with ktransformer2.attach(model, memory="2GB") as attached:
    for question in ("When is the rent due?", "Who pays for a new roof?"):
        inputs = tokenizer(lease + question, return_tensors="pt")
        began = time.perf_counter()
        model.generate(**inputs, max_new_tokens=1)
        passed, usage = time.perf_counter() - began, attached.usage
        print(f"{usage.cached_tokens} of {usage.prompt_tokens} tokens cached, first token after {passed:.3f} s")
