"""Does a text that another salt has read give itself away? Its first token is timed beside that of a text nobody read.

Every round has a text that only other salts know, one that nobody knows, and one that its own salt knows, in an order
drawn anew. The interval is that of `rounds.ratio`: it covers the true median in at least 95 of 100 repetitions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import median

from ktransformer2.bench.outcome import BenchOptions, say
from ktransformer2.bench.prefix_process import Text
from ktransformer2.bench.rounds import ratio, spread
from ktransformer2.engine.llm import LLM
from ktransformer2.engine.outputs import Usage
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.loading import LoadedModel

_TOKENS = 256  # short, so that a lookup would show beside what is computed
_OWNER = b"owner"
Row = dict[str, object]


def measure(loaded: LoadedModel, options: BenchOptions) -> tuple[list[Row], dict[str, float]]:
    """Rows and summary."""
    rounds = 5 if options.quick else 41
    text = Text.of(loaded, 0)
    known = list(text.token_ids[:_TOKENS])
    seconds: dict[str, list[float]] = {"another salt's": [], "nobody's": [], "its own": []}
    cached: dict[str, list[int]] = {way: [] for way in seconds}
    rng = random.Random(options.seed)
    with LLM(loaded) as llm:
        _first_token(llm, text.other, b"")
        _first_token(llm, known, _OWNER)
        say(f"{rounds} rounds of two salts")
        for number in range(1 + rounds):
            # What is read costs the same, whatever it says.
            unknown = [(token + 1 + number) % loaded.model.vocab_size for token in known]
            asked = [
                ("another salt's", known, b"%d" % number),
                ("nobody's", unknown, _OWNER),
                ("its own", known, _OWNER),
            ]
            rng.shuffle(asked)
            for way, prompt, salt in asked:
                took, usage = _first_token(llm, prompt, salt)
                cached[way].append(usage.cached_tokens)
                if number:  # the first round is not timed
                    seconds[way].append(took)
    found = ratio(seconds["another salt's"], seconds["nobody's"])
    rows: list[Row] = [
        {"part": f"a text of {_TOKENS} tokens", "way": f"{way} text", **spread(values).as_row("first_token_s")}
        | {"reused_tokens": median(cached[way])}
        for way, values in seconds.items()
    ]
    return rows, {
        "salt_foreign_tokens": float(max(cached["another salt's"])),
        "salt_own_share": min(cached["its own"]) / ((_TOKENS - 1) // 64 * 64),
        "salt_time_difference": max(abs(found.low - 1), abs(found.high - 1)),
    }


def _first_token(llm: LLM, prompt: Sequence[int], salt: bytes) -> tuple[float, Usage]:
    """Seconds from asking to the first token, and what the request cost."""
    began = time.perf_counter()
    llm.engine.add(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True), salt=salt)
    while True:
        for chunk in llm.engine.step():
            if chunk.output is not None:
                return time.perf_counter() - began, chunk.output.usage
