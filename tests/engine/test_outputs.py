"""What a request tells of itself when it is done: why not more of its prompt was in the cache."""

from __future__ import annotations

import pytest

from ktransformer2.cache.explain import Explanation
from ktransformer2.engine.outputs import Usage
from ktransformer2.engine.sampling import SamplingParams
from tests.engine.tiny_model import Bench, prompt


def usage(bench: Bench, token_ids: list[int], salt: bytes = b"", max_new_tokens: int = 16) -> Usage:
    bench.engine.add(token_ids, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True), salt=salt)
    while bench.engine.has_work:
        for chunk in bench.engine.step():
            if chunk.output is not None:
                return chunk.output.usage
    raise AssertionError("the request did not end")


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_a_miss_is_explained_as_it_was_before_the_prompt_was_read(kv: str) -> None:
    bench = Bench(kv=kv)
    text = prompt(90)
    other = [*text[:40], 98 if text[40] == 97 else 97, *text[41:]]
    assert usage(bench, text).miss == Explanation(90, 0, "new", 0)
    found = Explanation(90, 89, "found", 89) if kv == "full" else Explanation(90, 80, "form", 80)
    assert usage(bench, text).miss == found
    assert usage(bench, other).miss == Explanation(90, 40 if kv == "full" else 32, "differs", 40)
    bench.cache.clear()
    assert usage(bench, text).miss == Explanation(90, 0, "evicted", 0, "clear", 0.0)
    bench.close()


def test_a_tenant_is_not_told_of_another() -> None:
    bench = Bench()
    usage(bench, prompt(90), b"one")
    assert usage(bench, prompt(90), b"two").miss == Explanation(90, 0, "new", 0)
    assert bench.cache.explain(prompt(90), b"three").reason == "other salt"  # whoever runs the cache is
    bench.close()


def test_a_request_that_never_ran_was_never_looked_up() -> None:
    bench = Bench()
    bench.engine.add(prompt(90), request_id="waits")
    output = bench.engine.cancel("waits")
    assert output is not None
    assert output.usage.miss is None
    bench.close()
