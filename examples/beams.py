"""Beam search: four beams share the blocks of everything they have in common."""

import os

from transformers import AutoModelForCausalLM, AutoTokenizer

from ktransformer2 import DynamicKVCache

name = os.environ.get("KTRANSFORMER_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ktransformer2")
inputs = tokenizer("The tenant pays rent on the first day of each month. " * 20, return_tensors="pt")

cache = DynamicKVCache(model.config, memory="2GB")
answers = model.generate(**inputs, cache=cache, num_beams=4, num_return_sequences=4, max_new_tokens=24)
for text in tokenizer.batch_decode(answers[:, inputs["input_ids"].shape[1] :]):
    print(repr(text))

assert cache.kv is not None  # from the first token on
num_tokens, stats = cache.get_seq_length(), cache.kv.stats()
print(f"4 beams of {num_tokens} tokens in {stats.num_blocks} blocks; apart they would take {4 * -(-num_tokens // 64)}")
