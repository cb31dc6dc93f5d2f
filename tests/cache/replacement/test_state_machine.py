"""Runs the machine of `machine.py`; few steps a run and many runs, so that every policy meets every rule."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.cache.replacement.machine import RetentionMachine

TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
