"""Anybody who has a cache can serve it: a model with an engine, and a transformers model that was attached to."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from ktransformer2 import LLM, SamplingParams, attach
from ktransformer2.monitor import serve_metrics
from ktransformer2.monitor.client import MonitorClient, Observation

PROMPT = "The tenant shall pay the rent by the third day of the month, and not later. " * 4


def test_the_cache_of_an_llm(tiny_model_folder: Path) -> None:
    with LLM(tiny_model_folder, memory="64MB") as llm, serve_metrics(llm.cache, 0, model_name="tiny") as server:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        for _ in range(2):
            usage = llm.generate(PROMPT, params)[0].usage
        seen = Observation.from_json(MonitorClient(server.url).stats())
        assert seen.model == "tiny"
        assert seen.stats.lookup_tokens == 2 * usage.prompt_tokens
        assert seen.stats.hit_tokens == usage.cached_tokens > 0
        assert seen.stats.num_cached_blocks == seen.stats.num_blocks  # the snapshot is of after the last step


def test_the_cache_of_an_attached_model(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    ids = AutoTokenizer.from_pretrained(tiny_model_folder)(PROMPT, return_tensors="pt").input_ids
    with attach(model, memory="64MB") as attachment, serve_metrics(attachment.cache, 0) as server:
        for _ in range(2):
            model.generate(ids, max_new_tokens=4, do_sample=False)
        seen = Observation.from_json(MonitorClient(server.url).stats())
        assert seen.stats.hit_tokens == attachment.usage.cached_tokens > 0
