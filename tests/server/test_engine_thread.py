"""The thread behind the server, driven from an event loop of the test's own: life, crash, withdrawal, bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from ktransformer2.engine.llm import LLM
from ktransformer2.engine.sampling import SamplingParams
from ktransformer2.errors import ContextLengthError, EngineClosedError, ModelNotFoundError
from ktransformer2.models.batch import FlatBatch
from ktransformer2.models.loading import LoadedModel
from ktransformer2.server.engine_thread import EngineThread, Work
from ktransformer2.server.streams import Stream
from tests.server.serving import opened

LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=5, ignore_eos=True)
PROMPT = list(b"a prompt of more than a block")


class Doors:
    """Stands in front of a model's forward pass: `hold` makes the next one wait until `free`."""

    def __init__(self, llm: LLM) -> None:
        self._forward = llm.engine._model.forward
        self._open, self.waits = threading.Event(), threading.Event()
        self._open.set()
        self.error: Exception | None = None
        llm.engine._model = self  # type: ignore[assignment]  # all that is asked of it is `forward`

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        self.waits.set()
        self._open.wait()
        if self.error is not None:
            raise self.error
        return self._forward(batch)

    def hold(self) -> None:
        self._open.clear()
        self.waits.clear()

    def free(self) -> None:
        self._open.set()


def run(loaded: LoadedModel, test: Callable[[EngineThread, Doors], Coroutine[Any, Any, None]]) -> None:
    """`test` in an event loop of its own, with an engine that is ready; it is stopped in the end."""

    async def main() -> None:
        doors: list[Doors] = []

        def open_llm() -> LLM:
            llm = opened(loaded)
            doors.append(Doors(llm))
            return llm

        engine = EngineThread(open_llm)
        engine.start()
        await ready(engine)
        try:
            await test(engine, doors[0])
        finally:
            doors[0].free()
            await engine.stop(10)

    asyncio.run(main())


async def ready(engine: EngineThread) -> None:
    while engine.state == "loading":
        await asyncio.sleep(0)


def used(llm: LLM) -> int:
    llm.engine.check_integrity()
    llm.cache.check_integrity()
    stats = llm.cache.stats()
    return stats.num_blocks - stats.num_cached_blocks


def test_a_stream_gives_what_the_engine_gives(loaded: LoadedModel) -> None:
    async def test(engine: EngineThread, _: Doors) -> None:
        stream = await engine.submit([Work(PROMPT, SHORT), Work(PROMPT[:5], SHORT)])
        outputs = await stream.finish()
        assert [output.usage.prompt_tokens for output in outputs] == [len(PROMPT), 5]
        assert [len(output.token_ids) for output in outputs] == [5, 5]
        expected = await engine.call(lambda llm: [o.token_ids for o in llm.generate([PROMPT, PROMPT[:5]], SHORT)])
        assert [output.token_ids for output in outputs] == expected

    run(loaded, test)


def test_a_closed_stream_gives_its_blocks_back_before_the_next_step(loaded: LoadedModel) -> None:
    async def test(engine: EngineThread, doors: Doors) -> None:
        stream = await engine.submit([Work(PROMPT, LONG)])
        await stream.read(10)
        doors.hold()
        await asyncio.to_thread(doors.waits.wait)
        stream.close()  # in the middle of a step
        asked = asyncio.ensure_future(engine.call(lambda llm: (used(llm), llm.stats())))
        await asyncio.sleep(0)
        steps = engine.stats.num_steps
        doors.free()
        num_used, stats = await asked
        assert (num_used, stats.num_running, stats.num_cancelled) == (0, 0, 1)
        assert stats.num_steps == steps + 1  # the one that was under way

    run(loaded, test)


def test_who_gives_up_while_it_is_added_leaves_nothing_behind(loaded: LoadedModel) -> None:
    async def test(engine: EngineThread, doors: Doors) -> None:
        other = await engine.submit([Work(PROMPT, LONG)])
        doors.hold()
        await asyncio.to_thread(doors.waits.wait)
        waiting = asyncio.ensure_future(engine.submit([Work(PROMPT[:9], LONG)]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        other.close()
        doors.free()
        assert await engine.call(lambda llm: (used(llm), llm.engine.has_work)) == (0, False)

    run(loaded, test)


def test_a_refused_prompt_begins_none_of_those_beside_it(loaded: LoadedModel) -> None:
    async def test(engine: EngineThread, _: Doors) -> None:
        too_long = SamplingParams(max_new_tokens=10**6)
        with pytest.raises(ContextLengthError):
            await engine.submit([Work(PROMPT, SHORT), Work(PROMPT, too_long)])
        assert await engine.call(lambda llm: llm.stats().num_added) == 0

    run(loaded, test)


def test_a_crash_ends_every_stream_and_every_call(loaded: LoadedModel) -> None:
    async def test(engine: EngineThread, doors: Doors) -> None:
        streams = [await engine.submit([Work(PROMPT, LONG)]) for _ in range(2)]
        doors.hold()
        await asyncio.to_thread(doors.waits.wait)
        asked = asyncio.ensure_future(engine.call(lambda llm: llm.stats()))
        await asyncio.sleep(0)
        doors.error = RuntimeError("the device is gone, it said: secret prompt")
        doors.free()
        for stream in streams:
            with pytest.raises(EngineClosedError, match=r"has failed \(RuntimeError\)"):
                await stream.finish()
        with pytest.raises(EngineClosedError, match="failed"):
            await asked
        assert (engine.state, engine.error) == ("failed", "RuntimeError")
        with pytest.raises(EngineClosedError, match="failed"):
            await engine.submit([Work(PROMPT, SHORT)])

    run(loaded, test)


def test_a_model_that_cannot_be_opened_is_a_state_not_a_hang() -> None:
    async def main() -> None:
        def open_llm() -> LLM:
            raise ModelNotFoundError("no such model")

        engine = EngineThread(open_llm)
        engine.start()
        await ready(engine)
        assert (engine.state, engine.error) == ("failed", "ModelNotFoundError")
        await engine.stop(0)

    asyncio.run(main())


def test_stopping_lets_running_answers_end(loaded: LoadedModel) -> None:
    async def test(engine: EngineThread, doors: Doors) -> None:
        doors.hold()
        stream = await engine.submit([Work(PROMPT, SHORT)])
        stopping = asyncio.ensure_future(engine.stop(60))
        await asyncio.sleep(0)
        doors.free()
        (output,) = await stream.finish()
        assert len(output.token_ids) == 5
        await stopping
        assert engine.state == "ended"

    run(loaded, test)


def test_stopping_at_once_tells_who_still_waits(loaded: LoadedModel) -> None:
    async def test(engine: EngineThread, doors: Doors) -> None:
        stream = await engine.submit([Work(PROMPT, LONG)])
        await engine.stop(0)
        with pytest.raises(EngineClosedError, match="stopped"):
            await stream.finish()

    run(loaded, test)


def test_only_the_latest_progress_is_kept_and_every_token(loaded: LoadedModel) -> None:
    async def test(engine: EngineThread, _: Doors) -> None:
        stream: Stream = await engine.submit([Work(list(b"x" * 2000), SHORT)])
        while engine.stats.num_finished == 0:
            await asyncio.sleep(0)
        chunks = []
        while not stream.is_read:
            chunks.append(await stream.read(10))
        read = [chunk.prefill for chunk in chunks if chunk is not None and chunk.prefill is not None]
        assert read == [(2000, 2000)]  # of four steps: nobody read meanwhile
        assert sum(len(chunk.token_ids) for chunk in chunks if chunk is not None) == 5

    run(loaded, test)
