"""Every causal architecture of transformers, small and random: the answers of `generate`, or refused by name.

Two prompts of different length are answered in one ragged batch on an empty cache, and the first once more on what that
left behind; windows of 16 tokens are passed many times. Each answer is held against stock `generate` with DynamicCache
in fp32, token for token, and so is the distance of the two best logits at every token. The blocks that a sequence holds
are counted in every step: a group with a window never holds more than its window can reach. Then the doors for users
of transformers answer a shorter prompt: the drop-in, reading pages and over a gathered copy, and an attached model,
cold and warm.

    served       the same tokens by every way; a door may be shut, by a typed error (`Verdict.shut_doors`)
    refused      a typed error while loading
    different    anything else, an error of any other kind too: never acceptable
    not built    transformers itself cannot make the model

A first difference where the reference's own margin is at most 1e-3 is a near-tie: other weights are drawn, and counted.
Rows name model types; what is counted are classes, since several types may share one.
`python -m ktransformer2.bench.architectures`, in the repository, writes `docs/models.md` and the package's list.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ktransformer2.bench.fidelity import FP32_MARGIN, first_difference
from ktransformer2.bench.greedy_modes import Session
from ktransformer2.bench.models_page import DOORS, LIST, Verdict, as_list, models_page
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.reference import GreedyRun, Reference, greedy_run
from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig
from ktransformer2.engine.outputs import RequestOutput
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import ModelError, UnsupportedModelError
from ktransformer2.integrations.attach import attach
from ktransformer2.integrations.transformers_cache import DynamicKVCache
from ktransformer2.layout import ExtentLayout
from ktransformer2.models import tiny
from ktransformer2.models.batch import CausalModel, FlatBatch
from ktransformer2.models.hf import HFModel
from ktransformer2.models.loading import take_in
from ktransformer2.models.probe import refuse_unservable
from ktransformer2.models.registry import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_NEW = 40
# Nine windows and seven; together more tokens than a small model has positions; neither ends with a block.
PROMPT_TOKENS = (150, 117)
BLOCK_TOKENS = 16
_MAX_SEEDS = 4
_QUICK = ("llama", "gpt2", "gemma2", "gpt_oss", "mimo_v2_flash", "mixtral", "deepseek_v3", "mamba", "bart", "mpt")
_NUM_WARM = 20  # crosses a block
# Two blocks and a half, more than two windows; the answer crosses a block, and ends before the 64 positions where Phi-3
# and its kin put their cache aside.
DOOR_TOKENS, NUM_NEW_AT_DOORS = 41, 8
_DOOR_BYTES = 2**26
NOTHING_AGAIN = "answers alike, but finds nothing again: the model's calls bring more than tokens"


def run(options: BenchOptions) -> Outcome:
    """All architectures; a quick run takes one of each kind."""
    verdicts = sweep(_QUICK if options.quick else None)
    served = {verdict.class_name for verdict in verdicts if verdict.outcome == "served"}
    different = [verdict for verdict in verdicts if verdict.outcome == "different"]
    summary = {"silently_different": float(len(different))}
    if not options.quick:  # of a few the number says nothing
        summary = {"served_architectures": float(len(served)), **summary}
    return Outcome([verdict.row for verdict in verdicts], summary, {"dtype": "fp32", "new_tokens": NUM_NEW})


def sweep(model_types: Iterable[str] | None = None) -> list[Verdict]:
    """The verdict on each of `model_types`; None: on everything that transformers knows. On one thread."""
    known = tiny.causal_architectures()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain nothing from another
    verdicts = []
    try:
        with quiet_transformers():
            for model_type in sorted(known if model_types is None else model_types):
                verdicts.append(examine(model_type, known[model_type]))
                if verdicts[-1].outcome not in ("served", "refused"):
                    say(f"{model_type}: {verdicts[-1].outcome}: {verdicts[-1].reason}")
    finally:
        torch.set_num_threads(before)
    counts = Counter(verdict.outcome for verdict in verdicts)
    say(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return verdicts


def examine(model_type: str, class_name: str) -> Verdict:
    """Load and answer, with other weights after a near-tie."""
    for seed in range(_MAX_SEEDS):
        try:
            served = load_small(model_type, seed)
        except UnsupportedModelError as error:
            return Verdict(model_type, class_name, "refused", str(error))
        except ModelError as error:
            return Verdict(model_type, class_name, "not built", str(error))
        except Exception as error:  # of no type that a caller could expect
            return Verdict(model_type, class_name, "different", f"loading: {type(error).__name__}: {error}")
        try:
            held, difference = answers_differ(served, seed)
            shut, at_a_door = ((), "") if difference else doors_differ(served, seed)
        except Exception as error:  # it was taken in, so it must answer
            return Verdict(model_type, class_name, "different", f"answering: {type(error).__name__}: {error}")
        difference = difference or at_a_door
        if difference != NEAR_TIE:
            outcome = "different" if difference else "served"
            return Verdict(
                model_type, class_name, outcome, difference, served.geometry.groups, held, seed, shut, served.runner
            )
    return Verdict(model_type, class_name, "different", f"{_MAX_SEEDS} near-ties", near_ties=_MAX_SEEDS)


def load_small(model_type: str, seed: int) -> HFModel:
    """As any model is loaded: the config first, then the weights. Raises UnsupportedModelError, ModelError."""
    config = tiny.tiny_config(model_type)
    refuse_unservable(config)
    return take_in(tiny.build_random(config, seed))


# --- answers

NEAR_TIE = "near-tie"


def answers_differ(served: HFModel, seed: int) -> tuple[tuple[int, ...], str]:
    """Blocks held per layer group, and what differs from the reference: nothing (``), NEAR_TIE, or said in words."""
    rng = random.Random(seed)
    prompts = [_drawn(rng, served, length) for length in PROMPT_TOKENS]
    with served.original_attention() as bare:
        runs = [Reference(bare).greedy(prompt, NUM_NEW) for prompt in prompts]
    counted = _Counted(served)
    with Session(counted, CacheConfig(kv="full", block_tokens=BLOCK_TOKENS)) as session:
        counted.cache = session.cache
        names = [session.engine.add(prompt, _params(NUM_NEW)) for prompt in prompts]
        outputs = session.run()
        warm = session.engine.add(prompts[0], _params(_NUM_WARM))
        outputs |= session.run()
    assert outputs[warm].usage.cached_tokens == PROMPT_TOKENS[0] - 1, outputs[warm].usage
    differences = [
        _difference(way, _as_run(outputs[name]), run)
        for way, name, run in zip(("batched", "batched", "warm"), (*names, warm), (*runs, runs[0]), strict=True)
    ]
    return tuple(counted.held_blocks), next(filter(None, [*differences, counted.excess()]), "")


def _drawn(rng: random.Random, served: HFModel, length: int) -> list[int]:
    return [rng.randrange(3, served.vocab_size) for _ in range(length)]


def _params(num_new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, ignore_eos=True, logprobs=2)


def _as_run(output: RequestOutput) -> GreedyRun:
    assert output.logprobs is not None, "asked for logprobs"
    margins = tuple(chosen.top[0][1] - chosen.top[1][1] for chosen in output.logprobs)
    return GreedyRun(tuple(output.token_ids), margins)


def _difference(way: str, ours: GreedyRun, theirs: GreedyRun) -> str:
    """What differs from as much of the reference's answer as there is of ours."""
    place = first_difference(ours.token_ids, theirs.token_ids[: len(ours.token_ids)])
    if place is not None:
        margin = theirs.margins[place]
        return NEAR_TIE if margin <= FP32_MARGIN else f"{way}: token {place} differs, margin {margin:.3g}"
    worst = max(abs(a - b) for a, b in zip(ours.margins, theirs.margins, strict=False))
    return "" if worst <= FP32_MARGIN else f"{way}: the same tokens, but a margin is off by {worst:.3g}"


# --- the doors


def doors_differ(served: HFModel, seed: int) -> tuple[tuple[tuple[str, str], ...], str]:
    """The doors that refuse the model, with their reasons; and what differs, as `answers_differ` says it."""
    prompt = _drawn(random.Random(seed), served, DOOR_TOKENS)
    with served.original_attention() as bare:
        run = Reference(bare).greedy(prompt, NUM_NEW_AT_DOORS)
    found = _through_the_doors(served, prompt)
    shut = tuple((door, ours) for door, ours in found.items() if isinstance(ours, str))
    differences = [_difference(door, ours, run) for door, ours in found.items() if not isinstance(ours, str)]
    return shut, next(filter(None, differences), "")


def _through_the_doors(served: HFModel, prompt: Sequence[int]) -> dict[str, GreedyRun | str]:
    """By each of `DOORS` the answer, or why it is refused."""
    model = served.model
    paged = _dropped_in(model, prompt)
    with served.original_attention():
        gathered = _dropped_in(model, prompt)
        try:
            cold, warm = _attached(model, prompt)
        except UnsupportedModelError as error:
            return dict(zip(DOORS, (paged, gathered, str(error), str(error)), strict=True))
    return dict(zip(DOORS, (paged, gathered, cold, warm), strict=True))


def _dropped_in(model: PreTrainedModel, prompt: Sequence[int]) -> GreedyRun | str:
    cache = DynamicKVCache(model.config, kv="full", memory=_DOOR_BYTES, block_tokens=BLOCK_TOKENS)
    try:
        return greedy_run(model, prompt, NUM_NEW_AT_DOORS, cache)
    except UnsupportedModelError as error:
        return str(error)


def _attached(model: PreTrainedModel, prompt: Sequence[int]) -> tuple[GreedyRun, GreedyRun | str]:
    """The same call twice, the second time behind what the first one read."""
    with attach(model, kv="full", memory=_DOOR_BYTES, block_tokens=BLOCK_TOKENS) as held:
        cold = greedy_run(model, prompt, NUM_NEW_AT_DOORS)
        assert held.usage.cached_tokens == 0, held.usage
        warm = greedy_run(model, prompt, NUM_NEW_AT_DOORS)
        assert held.usage.cached_tokens in (0, held.usage.prompt_tokens - 1), held.usage
        assert held.num_plain_calls == 0, f"{held.num_plain_calls} calls went past the cache"
        assert warm.token_ids == cold.token_ids, "the second call answers otherwise"
        return cold, warm if held.usage.cached_tokens else NOTHING_AGAIN


# --- what is held


class _Counted:
    """A model that counts, in every step of single tokens, the blocks that a sequence holds of each layer group."""

    cache: KVCache

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.geometry, self.fingerprint = model.geometry, model.fingerprint
        self.vocab_size, self.weight_bytes = model.vocab_size, model.weight_bytes
        self.held_blocks = [0] * len(model.geometry.groups)

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        held = [_live_blocks(kv.entry_starts.tolist(), kv.entries[:, 0].tolist()) for kv in batch.kv]
        stats = self.cache.stats()
        in_use = sum(
            sum(blocks) * ExtentLayout.uniform(group, BLOCK_TOKENS, self.geometry.full_form).extent_bytes
            for blocks, group in zip(held, self.geometry.groups, strict=True)
        )
        assert stats.used_bytes - stats.cached_bytes == in_use, f"{stats}, but block tables name {in_use} bytes"
        if len(batch.token_ids) == len(held[0]):  # one token a sequence: the prompts are read
            self.held_blocks = [max(most, *blocks) for most, blocks in zip(self.held_blocks, held, strict=True)]
        return self._model.forward(batch)

    def excess(self) -> str:
        """Which group with a window held more blocks than the tokens that a query sees can lie in."""
        for group, held in zip(self.geometry.groups, self.held_blocks, strict=True):
            if group.window is not None and held > (group.window - 2) // BLOCK_TOKENS + 2:
                return f"a group with a window of {group.window} tokens holds {held} blocks of {BLOCK_TOKENS}"
        return ""


def _live_blocks(entry_starts: Sequence[int], block_ids: Sequence[int]) -> list[int]:
    """How many blocks each sequence's table still names."""
    return [sum(block_id >= 0 for block_id in block_ids[begin:end]) for begin, end in pairwise(entry_starts)]


if __name__ == "__main__":
    swept = sweep()
    Path("docs/models.md").write_text(models_page(swept), encoding="utf-8")
    LIST.write_text(as_list(swept), encoding="utf-8")
