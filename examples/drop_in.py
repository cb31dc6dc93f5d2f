"""The cache alone, in the `generate` of transformers: it grows with the text and holds it in int8."""

import os

from transformers import AutoModelForCausalLM, AutoTokenizer

from ktransformer2 import DynamicKVCache

name = os.environ.get("KTRANSFORMER_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ktransformer2")
inputs = tokenizer("The tenant pays rent on the first day of each month. " * 20, return_tensors="pt")

cache = DynamicKVCache(model.config, kv="int8", memory="2GB")
answer = model.generate(**inputs, cache=cache, max_new_tokens=32)  # below transformers 5.24: past_key_values=cache
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :]))

assert cache.kv is not None  # from the first token on
stats = cache.kv.stats()
print(f"{cache.get_seq_length()} tokens in {stats.num_blocks} blocks of {stats.used_bytes / 1e6:.2f} MB")
