"""A turned query sees a key as if the key had been moved."""

from __future__ import annotations

import pytest
import torch

from ktransformer2.kernels.rope import turn, turn_back
from ktransformer2.layout import RopeSpec

SPECS = {
    "half-split": RopeSpec(tuple(10_000.0 ** (-i / 16) for i in range(16))),
    "partial": RopeSpec(tuple(10_000.0 ** (-i / 6) for i in range(6))),
    "interleaved": RopeSpec(tuple(10_000.0 ** (-i / 12) for i in range(12)), interleaved=True),
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_quarter_turn_takes_the_first_channel_of_a_pair_to_the_second(spec: str) -> None:
    rope = RopeSpec((torch.pi / 2,) * len(SPECS[spec].inv_freq), SPECS[spec].interleaved)
    turned = turn(torch.eye(32), 1, rope)
    second = 1 if rope.interleaved else rope.rotary_size // 2
    torch.testing.assert_close(turned[0], torch.eye(32)[second])
    torch.testing.assert_close(turned[second], -torch.eye(32)[0])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shift", [-700, -1, 3, 4096])
def test_scores_of_a_moved_key(spec: str, shift: int) -> None:
    rope, generator = SPECS[spec], torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 5, 32, generator=generator)
    at, stored_at = 9000, 1300
    moved = (turn(q, at, rope) * turn(k, stored_at + shift, rope)).sum(-1)
    turned = (turn_back(turn(q, at, rope), shift, rope) * turn(k, stored_at, rope)).sum(-1)
    torch.testing.assert_close(turned, moved, rtol=1e-5, atol=1e-5)


def test_channels_past_the_rotary_size_stay_and_the_input_is_not_changed() -> None:
    q = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    before = q.clone()
    turned = turn(q, 17, SPECS["partial"])
    assert torch.equal(q, before)
    assert torch.equal(turned[:, 12:], q[:, 12:])
    assert not torch.isclose(turned[:, :12], q[:, :12]).all()
    torch.testing.assert_close(turned.norm(dim=1), q.norm(dim=1))


def test_no_shift_and_no_rope_turn_nothing() -> None:
    q = torch.randn(3, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(turn_back(q, 0, SPECS["partial"]), q.float())
    assert torch.equal(turn_back(q, 99, None), q.float())


def test_far_positions_are_as_exact_as_near_ones() -> None:
    """In fp32 the angle at a million positions would be off by hundredths of a radian."""
    q = torch.randn(4, 32, generator=torch.Generator().manual_seed(4))
    there_and_back = turn(turn(q, 1_000_003, SPECS["half-split"]), -1_000_003, SPECS["half-split"])
    torch.testing.assert_close(there_and_back, q, rtol=1e-5, atol=1e-6)
    two_steps = turn(turn(q, 1_000_000, SPECS["half-split"]), 3, SPECS["half-split"])
    torch.testing.assert_close(two_steps, turn(q, 1_000_003, SPECS["half-split"]), rtol=1e-5, atol=1e-6)
