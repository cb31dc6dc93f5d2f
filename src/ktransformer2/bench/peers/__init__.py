"""Beside every engine a user would pick instead: each in an environment of its own, at its best, in interleaved rounds.

contenders     who takes part           environments, model_files    what they need, made once
process, field who runs, who failed     parts, summary               what is asked, what follows
workers/       one file for each peer, run by its own interpreter
"""

from ktransformer2.bench.peers.plot import draw
from ktransformer2.bench.peers.scenario import PARTS, run

__all__ = ["PARTS", "draw", "run"]
