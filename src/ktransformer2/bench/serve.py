"""Many chats at once against a server: first token, time between tokens, cached share, errors.

The server is our own on the pinned model, in a process of its own, or any OpenAI-compatible one that `--url` names (its
key in OPENAI_API_KEY). Chats begin by a Poisson process; each begins with a text of its own and goes on with questions.

What can be found: of a later turn all that the turn before it had computed, in whole blocks. `good_share` is
the share of all turns whose first token and mean gap between tokens keep the two bounds below.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

from ktransformer2.bench.chat_load import Endpoint, Load, Turn, replay
from ktransformer2.bench.corpus import text_of
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.rounds import quantile
from ktransformer2.errors import NoServerError

TAKES_URL = True
_READY_S = 30.0
_CHATS, _TURNS, _PER_SECOND, _NEW_TOKENS = 32, 6, 1.0, 32
_QUICK_CHATS, _QUICK_TURNS, _QUICK_PER_SECOND, _QUICK_NEW_TOKENS = 4, 3, 20.0, 8
_OPENING_CHARACTERS, _QUICK_OPENING_CHARACTERS, _QUESTION_CHARACTERS = 3000, 800, 120
_GOOD_TTFT_S, _GOOD_GAP_S = 2.0, 0.25


def run(options: BenchOptions) -> Outcome:
    """Play the chats and judge the turns. Raises: NoServerError, ConfigError, ModelError."""
    with _server(options) as endpoint:
        model, block_tokens = endpoint.model()
        load = drawn(options)
        say(f"{len(load.chats)} chats of {len(load.chats[0])} turns against {model} at {endpoint.url}")
        turns = replay(endpoint, model, load)
    return judged(turns, block_tokens, len(load.chats) * len(load.chats[0]))


def drawn(options: BenchOptions) -> Load:
    """The chats that the seed draws."""
    draw, text = random.Random(options.seed), text_of("english")
    quick = options.quick
    num_chats = options.num_prompts or (_QUICK_CHATS if quick else _CHATS)
    num_turns = _QUICK_TURNS if quick else _TURNS

    def passage(size: int) -> str:
        start = draw.randrange(len(text) - size)
        return text[start : start + size]

    chats = [
        [
            passage(_QUICK_OPENING_CHARACTERS if quick else _OPENING_CHARACTERS),
            *(passage(_QUESTION_CHARACTERS) for _ in range(num_turns - 1)),
        ]
        for _ in range(num_chats)
    ]
    starts, now = [], 0.0
    for _ in chats:
        starts.append(now)
        now += draw.expovariate(_QUICK_PER_SECOND if quick else _PER_SECOND)
    return Load(chats, starts, _QUICK_NEW_TOKENS if quick else _NEW_TOKENS)


def judged(turns: Sequence[Turn], block_tokens: int, num_wanted: int) -> Outcome:
    """Rows by place in the chat, and the keys. Turns that a chat with an error did not come to count as errors."""
    whole = [turn for turn in turns if not turn.error]
    for turn in turns:
        if turn.error:
            say(f"chat {turn.chat}, turn {turn.number}: {turn.error}")
    later = [turn for turn in whole if turn.number > 0]
    gaps = [gap for turn in whole for gap in turn.gaps_s]
    found, findable = _found(whole, block_tokens)
    good = [turn for turn in whole if turn.ttft_s <= _GOOD_TTFT_S and _mean(turn.gaps_s) <= _GOOD_GAP_S]
    summary: dict[str, float] = {"serve_errors": num_wanted - len(whole)}
    if later and gaps:
        cold = median(turn.ttft_s for turn in whole if turn.number == 0)
        summary |= {
            "cached_share": found / findable if findable else 0.0,
            "ttft_later_turns_vs_cold": median(turn.ttft_s for turn in later) / cold,
            "good_share": len(good) / num_wanted,
            "inter_token_p95_ms": 1000 * quantile(gaps, 0.95),
        }
    numbers = sorted({turn.number for turn in whole})
    rows = [_row(number, [turn for turn in whole if turn.number == number]) for number in numbers]
    bounds = {"good_ttft_s": _GOOD_TTFT_S, "good_gap_s": _GOOD_GAP_S}
    return Outcome(rows, summary, {"block_tokens": block_tokens, **bounds})


def _row(number: int, turns: Sequence[Turn]) -> dict[str, object]:
    gaps = [gap for turn in turns for gap in turn.gaps_s] or [0.0]
    first = [turn.ttft_s for turn in turns]
    return {
        "turn": number + 1,
        "chats": len(turns),
        "prompt_tokens": round(_mean([turn.prompt_tokens for turn in turns])),
        "cached_tokens": round(_mean([turn.cached_tokens for turn in turns])),
        "ttft_p50_ms": round(1000 * median(first), 1),
        "ttft_p95_ms": round(1000 * quantile(first, 0.95), 1),
        "gap_p50_ms": round(1000 * median(gaps), 1),
    }


def _found(turns: Sequence[Turn], block_tokens: int) -> tuple[int, int]:
    """(cached tokens of later turns, those that could be): the last token of an answer is never computed."""
    found = findable = 0
    for before, turn in pairwise(turns):
        if before.chat == turn.chat:
            computed = before.prompt_tokens + before.new_tokens - 1
            can = min(computed // block_tokens * block_tokens, turn.prompt_tokens - 1)
            found, findable = found + min(turn.cached_tokens, can), findable + can
    return found, findable


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@contextmanager
def _server(options: BenchOptions) -> Iterator[Endpoint]:
    """The server that is named, or one of our own until the end of the block."""
    if options.url is not None:
        yield Endpoint(options.url, os.environ.get("OPENAI_API_KEY", ""))
        return
    from ktransformer2.models.demo import smollm2_from_wheel
    from ktransformer2.models.store import cache_directory

    model = options.model or str(smollm2_from_wheel(cache_directory()))
    command = [sys.executable, "-m", "ktransformer2.cli", "serve", model, "--port", "0", "--no-persist"]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=here) as process:
        assert process.stderr is not None, "it was started with a pipe"
        try:
            endpoint = Endpoint(_url(process))
            threading.Thread(target=process.stderr.read, daemon=True).start()  # so that the pipe never fills
            _wait_until_ready(endpoint)
            yield endpoint
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(endpoint: Endpoint) -> None:
    """It says where it listens a moment before it answers. Raises: NoServerError."""
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            endpoint.model()
        except NoServerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _url(process: subprocess.Popen[str]) -> str:
    """What the server says of itself once it is ready. Raises: NoServerError with its last words."""
    assert process.stderr is not None, "it was started with a pipe"
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"API\s+(http://\S+)/v1", line):
            return found[1]
    raise NoServerError(f"the server ended before it was ready:\n{''.join(said)[-2000:]}")
