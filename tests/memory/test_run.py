"""Bits of a run, against lists of states."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ktransformer2.memory.run import Run, RunOccupancy, lowest_bit, set_bits


@given(st.lists(st.sampled_from(["empty", "free", "used"]), min_size=1, max_size=70))
def test_masks_agree_with_a_list_of_states(states: list[str]) -> None:
    run = Run(0, len(states))
    assert run.longest_unused() == len(states)
    run.free = sum(1 << i for i, state in enumerate(states) if state == "free")
    run.empty = sum(1 << i for i, state in enumerate(states) if state == "empty")
    places = [i for i, state in enumerate(states) if state == "used"]
    assert list(set_bits(run.used)) == places
    stretches = "".join("x" if state == "used" else "." for state in states).split("x")
    assert run.longest_unused() == max(map(len, stretches))
    assert run.longest_unused() == max(map(len, stretches)), "the second answer is the remembered one"
    seen = RunOccupancy(0, len(states), run.used)
    assert list(set_bits(seen.unused)) == [i for i in range(len(states)) if i not in places]
    if places:
        assert lowest_bit(run.used) == places[0]
