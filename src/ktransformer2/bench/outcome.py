"""What a scenario is asked and what it hands back. Knows no scenario."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from ktransformer2.errors import ConfigError

SCENARIOS = (
    *("attention", "decode", "memory", "fidelity", "architectures", "plan", "dropin", "monitor", "policy"),
    *("tiers", "prefix", "overhead", "linear", "peers", "serve"),
)
DTYPES = ("fp32", "bf16")
_STARTED = time.monotonic()


@dataclass(frozen=True)
class BenchOptions:
    """How a scenario is run. `dtype`, `num_prompts` and `max_tokens` left at None mean what the targets were set for.

    Units: `max_tokens` bounds the length of a drawn prompt. `model` is what `load_model` takes; None: the pinned model.
    `trace`: a file of one's own for `policy`; `num_touches`: how many uses of blocks its agents' sessions have.
    `url`: the server that `serve` asks; None: one of our own. `resume`: where a scenario that can go on later keeps
    what is done.
    `parts` of the scenario, by name; none: all. A part that is run in full counts as much as in a run of all.
    """

    quick: bool = False
    seed: int = 2024
    dtype: str | None = None
    num_prompts: int | None = None
    max_tokens: int | None = None
    model: str | None = None
    parts: tuple[str, ...] = ()
    trace: str | None = None
    num_touches: int | None = None
    resume: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not allowed; allowed: {', '.join(DTYPES)}")
        for name in ("num_prompts", "max_tokens", "num_touches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is not allowed; allowed: 1 or more")

    def wants(self, part: str) -> bool:
        """Whether this part of the scenario is run."""
        return not self.parts or part in self.parts

    @property
    def is_full(self) -> bool:
        """A full run measures all that the targets ask. Only full runs enter the status and the README."""
        bounds = (self.num_prompts, self.max_tokens, self.model, self.trace, self.num_touches, self.url)
        return not self.quick and all(bound is None for bound in bounds)


@dataclass(frozen=True)
class Outcome:
    """Rows for people, a flat summary for the targets, and the scenario's own share of the configuration."""

    rows: list[dict[str, object]]
    summary: dict[str, float]
    configuration: dict[str, object] = field(default_factory=dict)


def say(message: str) -> None:
    """One line of progress on stderr; stdout is left to the tables."""
    print(f"[bench {time.monotonic() - _STARTED:7.1f} s] {message}", file=sys.stderr, flush=True)
