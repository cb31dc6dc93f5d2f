"""From logits to the next token, one row per answer. Knows no scheduler, no cache and no text.

Order of operations, as vLLM has it (`transformers` differs only in taking min_p after top_p):
    log probabilities reported (of the raw logits) -> repetition penalty -> frequency and presence penalty ->
    logit bias -> constraint -> temperature 0: the largest logit | temperature -> min_p -> top_k -> top_p -> one draw

Every random row is worked out alone and draws exactly one number per token from its own generator, so an answer depends
on its seed and its logits, never on which other requests share the step. What is best of all rows is found in one call.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ktransformer2.engine.outputs import TokenLogprob
from ktransformer2.engine.sampling import SamplingParams

# A nucleus is looked for among this many best tokens before all of them are sorted (of 49k, 0.4, 1 and 5 ms).
_NUCLEUS_LOOKS = (1024, 8192)


class SampledToken(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None = None


class Constraint(Protocol):
    """Which tokens may come next in one answer: it is told of every one that was chosen."""

    def allowed(self, vocab_size: int) -> torch.Tensor:
        """bool [V]; at least one is allowed."""
        ...

    def observe(self, token_id: int) -> None: ...


class SamplingState:
    """What sampling one answer needs to remember: its generator, its constraint, the tokens that penalties count."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], index: int = 0) -> None:
        """`index` is the answer's number among `params.n`."""
        self.params = params
        self.is_plain = params.is_plain
        self.penalties = Penalties(params, prompt_ids) if params.has_penalties else None
        self._constraint = None if params.constraint is None else params.constraint()
        self._seed = secrets.randbits(63) if params.seed is None else _seed_of(params.seed, index)
        self._generator: torch.Generator | None = None

    def uniform(self) -> float:
        """The next number in [0, 1) of this answer's own stream."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._seed)
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def observe(self, token_id: int) -> None:
        if self.penalties is not None:
            self.penalties.observe(token_id)
        if self._constraint is not None:
            self._constraint.observe(token_id)

    def adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [V] after penalties, bias and constraint; the argument is left as it is."""
        if self.penalties is not None:
            logits = self.penalties.apply(logits)
        if self.params.logit_bias:
            tokens, biases = zip(*self.params.logit_bias.items(), strict=True)
            logits = logits.index_add(0, torch.tensor(tokens), torch.tensor(biases, dtype=logits.dtype))
        if self._constraint is not None:
            logits = logits.masked_fill(~self._constraint.allowed(logits.shape[0]), -math.inf)
        return logits


def _seed_of(seed: int, index: int) -> int:
    """The first answer has the seed itself, the others a hash of seed and index: seeds 1, 2, ... do not overlap."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Penalties:
    """Repetition, frequency and presence penalty of one answer. Vectors over the vocabulary are made at first use."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt_ids = prompt_ids
        self._answer: list[int] = []
        self._seen: torch.Tensor | None = None  # bool [V]: in prompt or answer
        self._counts: torch.Tensor | None = None  # fp32 [V]: times in the answer

    def observe(self, token_id: int) -> None:
        self._answer.append(token_id)
        if self._seen is not None and self._counts is not None:
            self._seen[token_id] = True
            self._counts[token_id] += 1

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [V] after the penalties; the argument is left as it is."""
        params = self._params
        seen, counts = self._vectors(logits.shape[0])
        if params.repetition_penalty != 1:
            factor = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    def _vectors(self, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._seen is None or self._counts is None:
            answer = torch.tensor(self._answer, dtype=torch.int64)
            self._counts = torch.bincount(answer, minlength=vocab_size).float()
            self._seen = self._counts > 0
            self._seen[torch.tensor(self._prompt_ids, dtype=torch.int64)] = True
        return self._seen, self._counts


def best_tokens(logits: torch.Tensor) -> list[int | None]:
    """The token of the largest logit of each row of [N, V], the first of equals. None: it cannot be sampled from.

    That is a row with NaN or +inf, or without a finite logit; -inf beside finite ones is a model's way to forbid a
    token.
    """
    rows = logits.numpy()  # whose argmax is many times as fast as torch's
    best = rows.argmax(axis=-1)
    # What it finds is NaN where one is, +inf where one is, and -inf only where all are: a single pass says both.
    finite = np.isfinite(rows[np.arange(len(rows)), best])
    return [token_id if ok else None for token_id, ok in zip(best.tolist(), finite.tolist(), strict=True)]


def sample(logits: torch.Tensor, row: int, best: int, state: SamplingState) -> SampledToken:
    """The next token of an answer from a row of fp32 logits [N, V], whose largest is that of the token `best`.

    Side effect: one number is drawn from the generator of an answer that is not greedy.
    """
    token_id = best if state.is_plain else _choose(state.adjusted(logits[row]), state)
    num_top = state.params.logprobs
    return SampledToken(token_id, None if num_top is None else _logprob(logits[row], token_id, num_top))


def _choose(logits: torch.Tensor, state: SamplingState) -> int:
    if state.params.is_greedy:
        return int(logits.numpy().argmax())
    values, token_ids = candidates(logits, state.params)
    return int(token_ids[_draw(values, state.uniform())])


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens may be drawn: their logits fp64 after temperature (the largest is 0), and their ids."""
    # The largest is taken off first: a small temperature must not make infinities.
    values = (logits.double() - logits.max()) / params.temperature  # [V]
    token_ids = torch.arange(logits.shape[0])
    if values.max() != 0:  # a penalty has made an infinity of the largest, so that this is NaN
        return values.new_zeros(1), logits.argmax().view(1)
    if 0 < params.top_k < values.shape[0]:
        values, token_ids = values.topk(params.top_k)
    if params.min_p > 0:
        # min_p is relative to the best token, which top_k keeps, so it may be taken after top_k.
        likely = values >= math.log(params.min_p)
        values, token_ids = values[likely], token_ids[likely]
    if params.top_p < 1:
        values, kept = _nucleus(values, params.top_p)
        token_ids = token_ids[kept]
    return values, token_ids


def _nucleus(values: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest largest of `values` whose probabilities reach top_p, largest first, and where they stood."""
    total = values.logsumexp(dim=0)
    for size in (*(look for look in _NUCLEUS_LOOKS if look < values.shape[0]), values.shape[0]):
        best, places = values.topk(size)
        shares = (best - total).exp().cumsum(dim=0)
        if float(shares[-1]) >= top_p:
            break
    # All that come before the sum is reached, and the one that reaches it.
    num_kept = min(int((shares < top_p).sum()) + 1, best.shape[0])
    return best[:num_kept], places[:num_kept]


def _draw(values: torch.Tensor, uniform: float) -> int:
    """The place whose share of [0, 1) the number falls in; sums in fp64, so that a logit's last bit hardly counts."""
    shares = values.exp().cumsum(dim=0)
    place = torch.searchsorted(shares, uniform * shares[-1], right=True)
    return min(int(place), values.shape[0] - 1)


def _logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    logprobs = logits.log_softmax(dim=-1)
    best, token_ids = logprobs.topk(min(num_top, logprobs.shape[0]))
    top = tuple(zip(token_ids.tolist(), best.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)
