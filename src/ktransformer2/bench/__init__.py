"""Proof: scenarios that measure what the package promises, each against a named rival on the same machine.

A scenario is one file with a `run(options) -> Outcome`; `run.py` knows their names, adds the configuration and writes
JSON. Rules: shipped defaults only; everything compared is measured in interleaved rounds of one run; medians with
intervals; everything drawn is drawn from a seed. Figures of `--quick` runs are for finding faults, never for quoting.
"""
