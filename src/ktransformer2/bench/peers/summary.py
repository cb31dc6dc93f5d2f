"""Ratios against the best peer and against each alone. Pure: seconds in, keys out.

A ratio is taken round by round, then its median. Decoding and requests at once: the rival's time over ours, above 1 we
are faster. First tokens: ours over the rival's, below 1 we are faster. The best of a width is the contender with the
smallest median there. Where fewer than three engines answered, nothing is said about a best; where nobody, or not ours,
serves a width, nothing is said about that width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ktransformer2.bench.peers.contenders import OURS, WIDTHS, Contender
from ktransformer2.bench.rounds import ratio

ENOUGH_ENGINES = 3
_KEY_OF_ENGINE = {"transformers": "hf_best", "llama.cpp": "llamacpp", "vllm": "vllm", "openvino": "openvino"}
Series = Mapping[str, Sequence[float]]


class Standing:
    """One figure of all contenders that have it."""

    def __init__(self, contenders: Sequence[Contender], seconds: Series) -> None:
        self._seconds = seconds
        self._there = [contender for contender in contenders if contender.name in seconds]

    @property
    def num_engines(self) -> int:
        """Rival engines; two builds of one are one."""
        return len({contender.engine for contender in self._there if contender.peer != OURS})

    def ours(self, width: str, full_kv: bool = False) -> str | None:
        """Ours in a width; None where it does not serve it or failed."""
        names = [c.name for c in self._there if c.peer == OURS and c.width == width and c.full_kv == full_kv]
        return names[0] if names else None

    def rival(self, width: str, engine: str | None = None) -> str | None:
        """The fastest rival in a width, of all or of one engine."""
        names = [c.name for c in self._there if c.peer != OURS and c.width == width and engine in (None, c.engine)]
        return min(names, key=lambda name: median(self._seconds[name]), default=None)

    def over(self, above: str | None, below: str | None) -> float | None:
        """The median ratio of two contenders; None where one is missing."""
        if above is None or below is None:
            return None
        return ratio(self._seconds[above], self._seconds[below]).median

    def best_over_ours(self, width: str) -> float | None:
        return self.over(self.rival(width), self.ours(width)) if self.num_engines >= ENOUGH_ENGINES else None

    def ours_over_best(self, width: str) -> float | None:
        return self.over(self.ours(width), self.rival(width)) if self.num_engines >= ENOUGH_ENGINES else None


def of_length(contenders: Sequence[Contender], first_s: Series, token_s: Series, length: str) -> dict[str, float]:
    """Keys of one length of prompt, `512` or `8k`."""
    first, token = Standing(contenders, first_s), Standing(contenders, token_s)
    found = {f"decode_vs_best_{length}_{width}": token.best_over_ours(width) for width in WIDTHS}
    found[f"ttft_vs_best_{length}"] = first.ours_over_best("bf16")
    if length == "8k":
        ours = token.ours("bf16")
        for engine, key in _KEY_OF_ENGINE.items():
            found[f"decode_vs_{key}_8k"] = token.over(token.rival("bf16", engine), ours)
        found["ttft_vs_llamacpp_8k"] = first.over(first.ours("bf16"), first.rival("bf16", "llama.cpp"))
        found["ttft_vs_hf_8k"] = first.over(first.ours("bf16"), first.rival("bf16", "transformers"))
        found["int8_kv_vs_full_kv_decode_8k"] = token.over(token.ours("bf16", full_kv=True), ours)
        found["int8_kv_vs_full_kv_ttft_8k"] = first.over(first.ours("bf16"), first.ours("bf16", full_kv=True))
    return _known(found)


def slowdown(contenders: Sequence[Contender], token_s: Series, long_token_s: Series) -> dict[str, float]:
    """Ours: time a token behind the long prompt over that behind the short one."""
    name = Standing(contenders, token_s).ours("bf16")
    if name is None or name not in long_token_s:
        return {}
    return {"decode_slowdown_512_to_8k": median(long_token_s[name]) / median(token_s[name])}


def of_warm(contenders: Sequence[Contender], seconds: Series) -> dict[str, float]:
    return _known({"warm_ttft_vs_best": Standing(contenders, seconds).ours_over_best("bf16")})


def of_batch(contenders: Sequence[Contender], seconds: Series) -> dict[str, float]:
    return _known({"batch8_vs_best": Standing(contenders, seconds).best_over_ours("bf16")})


def _known(found: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in found.items() if value is not None}
