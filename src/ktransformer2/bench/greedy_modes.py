"""Ways to answer one prompt that must not change the answer: batched, chunked, preempted, from a hit, forked, moved.

Every way drives the engine and `KVCache` as anybody can, at model precision (`kv="full"`). An `Answer` carries the
evidence that its way was taken. Knows no reference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktransformer2.cache.kv_cache import KVCache
from ktransformer2.config import CacheConfig, EngineConfig
from ktransformer2.engine.engine import Engine
from ktransformer2.engine.outputs import RequestOutput
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.models.batch import CausalModel, FlatBatch

DRAWN_MODES = ("batch", "chunked", "preempted", "partial_hit", "fork", "shift", "defrag")
BATCH_SIZE = 8
_DECOY_PROMPT, _DECOY_NEW = 50, 70  # crosses a block of 64 in its 15th step, and fits two blocks
_MAX_SHIFT = 1000
_STEP_TOKENS = 512


@dataclass(frozen=True)
class Answer:
    """`evidence`: tokens reused, preemptions, chunks, positions shifted or bytes moved; 0: the way was not taken."""

    mode: str
    token_ids: tuple[int, ...]
    evidence: int


class Session:
    """One engine over one empty cache, closed at the end."""

    def __init__(self, model: CausalModel, cache: CacheConfig, engine: EngineConfig | None = None) -> None:
        self.cache = KVCache(model.geometry, cache, model.fingerprint)
        self.engine = Engine(model, self.cache, config=engine)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.cache.check_integrity()
        self.cache.close()

    def run(self) -> dict[str, RequestOutput]:
        """Steps until nothing is left to do. Raises what ended a request."""
        outputs: dict[str, RequestOutput] = {}
        while self.engine.has_work:
            outputs |= self.step()
        return outputs

    def step(self) -> dict[str, RequestOutput]:
        found = {chunk.request_id: chunk.output for chunk in self.engine.step() if chunk.output is not None}
        for output in found.values():
            if output.error is not None:
                raise output.error
        return found


class GreedyModes:
    """Answers of `num_new` tokens to prompts on one model."""

    def __init__(self, model: CausalModel, num_new: int) -> None:
        self.model, self.num_new = model, num_new
        self._full = CacheConfig(kv="full")

    def alone(self, prompt: Sequence[int]) -> Answer:
        """The prompt on an empty cache."""
        with self._session() as session:
            cold = self._one(session, prompt)
        return Answer("alone", cold.token_ids, int(cold.usage.cached_tokens == 0))

    def alone_and_warm(self, prompt: Sequence[int]) -> list[Answer]:
        """The prompt on an empty cache, and once more on what that left behind."""
        with self._session() as session:
            cold = self._one(session, prompt)
            warm = self._one(session, prompt)
        return [
            Answer("alone", cold.token_ids, int(cold.usage.cached_tokens == 0)),
            Answer("warm", warm.token_ids, warm.usage.cached_tokens),
        ]

    def sealed_cold_and_warm(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], tuple[float, ...], Answer]:
        """int8: the cold answer, the distance of the two best logits at each of its tokens, the warm answer."""
        with self._session(CacheConfig(kv="int8")) as session:
            cold = self._one(session, prompt, logprobs=2)
            warm = self._one(session, prompt)
        assert cold.logprobs is not None, "asked for logprobs"
        margins = tuple(place.top[0][1] - place.top[1][1] for place in cold.logprobs)
        return cold.token_ids, margins, Answer("int8_warm", warm.token_ids, warm.usage.cached_tokens)

    def batch(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """All prompts at once, one answer each."""
        with self._session() as session:
            names = [session.engine.add(prompt, self._params()) for prompt in prompts]
            outputs = session.run()
        return [Answer("batch", outputs[name].token_ids, len(prompts)) for name in names]

    def drawn(self, mode: str, prompt: Sequence[int], rng: random.Random) -> list[Answer]:
        """The prompt in one of `DRAWN_MODES` but `batch`; one answer, or two from a fork."""
        ways = {
            "chunked": self._chunked,
            "preempted": self._preempted,
            "partial_hit": self._partial_hit,
            "fork": self._fork,
            "shift": self._shift,
            "defrag": self._defrag,
        }
        return ways[mode](prompt, rng)

    def _chunked(self, prompt: Sequence[int], rng: random.Random) -> list[Answer]:
        chunk = max(len(prompt) // rng.randint(2, 9), 1)
        with self._session(engine=EngineConfig(max_step_tokens=chunk)) as session:
            output = self._one(session, prompt)
        return [Answer("chunked", output.token_ids, -(-len(prompt) // chunk) - 1)]

    def _preempted(self, prompt: Sequence[int], rng: random.Random) -> list[Answer]:
        """Behind an older request, in memory that holds all of it and one block of the other, which comes to need 2."""
        size = self._full.block_tokens
        with self._session() as session:
            room = session.cache.bytes_for(-(-(len(prompt) + self.num_new) // size) * size)
        room += 8 * (len(prompt) + _DECOY_PROMPT) + 4096  # for the other's block table too: far less than an extent
        with self._session(CacheConfig(kv="full", memory_bytes=room)) as session:
            session.engine.add(self._tokens(rng, _DECOY_PROMPT), self._params(_DECOY_NEW))
            name = session.engine.add(prompt, self._params())
            output = session.run()[name]
        return [Answer("preempted", output.token_ids, output.usage.num_preemptions)]

    def _partial_hit(self, prompt: Sequence[int], rng: random.Random) -> list[Answer]:
        """After another prompt that begins the same and then differs."""
        shared = rng.randrange(len(prompt))
        other = [*prompt[:shared], (prompt[shared] + 1) % self.model.vocab_size, *self._tokens(rng, 40)]
        with self._session() as session:
            session.engine.add(other, self._params(2))
            session.run()
            output = self._one(session, prompt)
        return [Answer("partial_hit", output.token_ids, output.usage.cached_tokens)]

    def _fork(self, prompt: Sequence[int], rng: random.Random) -> list[Answer]:
        with self._session() as session:
            output = self._one(session, prompt, n=2)
        return [Answer("fork", completion.token_ids, 1) for completion in output.completions]

    def _defrag(self, prompt: Sequence[int], rng: random.Random) -> list[Answer]:
        """An older request leaves in the middle, its blocks are freed, and what follows is moved, again and again."""
        with self._session() as session:
            decoy = session.engine.add(self._tokens(rng, rng.randint(65, 400)), self._params(4 * self.num_new))
            name = session.engine.add(prompt, self._params())
            outputs: dict[str, RequestOutput] = {}
            while session.engine.stats().decode_tokens < self.num_new:  # of both: the prompt is read, half is answered
                outputs |= session.step()
            session.engine.cancel(decoy)
            session.cache.clear()
            moved = 0
            while session.engine.has_work:
                moved += session.cache.defragment()
                outputs |= session.step()
        return [Answer("defrag", outputs[name].token_ids, moved)]

    def _shift(self, prompt: Sequence[int], rng: random.Random) -> list[Answer]:
        """Moved away behind the prompt, and back in the middle of the answer."""
        delta = rng.randint(1, _MAX_SHIFT)
        cache = KVCache(self.model.geometry, self._full, self.model.fingerprint)
        table, answer = cache.new_table(), list[int]()
        todo = list(prompt)
        while len(answer) < self.num_new:
            chunk, todo = todo[:_STEP_TOKENS], todo[_STEP_TOKENS:]
            assert cache.allocate(table, len(chunk)), "no room in an empty cache"
            positions = torch.arange(table.next_position, table.next_position + len(chunk))
            kv = cache.prepare([(table, len(chunk))])
            logits = self.model.forward(FlatBatch(torch.tensor(chunk), positions, kv, torch.tensor([len(chunk) - 1])))
            cache.publish(table, chunk)
            if not todo:
                answer.append(int(logits[0].argmax()))
                todo = answer[-1:]
                if len(answer) in (1, self.num_new // 2):
                    cache.shift(table, delta if len(answer) == 1 else -delta)
        cache.release(table)
        cache.check_integrity()
        cache.close()
        return [Answer("shift", tuple(answer), delta)]

    def _session(self, cache: CacheConfig | None = None, engine: EngineConfig | None = None) -> Session:
        return Session(self.model, cache or self._full, engine)

    def _one(self, session: Session, prompt: Sequence[int], **more: int) -> RequestOutput:
        name = session.engine.add(prompt, self._params(**more))
        return session.run()[name]

    def _params(self, max_new_tokens: int | None = None, n: int = 1, logprobs: int | None = None) -> SamplingParams:
        num_new = max_new_tokens or self.num_new
        return SamplingParams(max_new_tokens=num_new, ignore_eos=True, n=n, logprobs=logprobs)

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(self.model.vocab_size) for _ in range(count)]
