"""Who should stay: every replacement policy and the optimum on traces of real services, in hits.

Protocol. Policies were tuned on the first half of each trace (agents: of an interleaving with seed 1); a row counts the
second half only, after a replay of the first, and the agents' sessions are interleaved by seeds that nothing was tuned
on. Capacity is a share of the trace's unique blocks. `ceiling` is a cache without a limit; `gap` is the share of the
way from LRU to the optimum (`policy_sim` says which). Hints are wrong with a chance of 10 %; their figures are means
over three seeds. A trace of one's own (`--trace`) is replayed with every policy, and no target is judged on it, nor on
more or fewer of the agents' sessions than two million touches (`--touches`; the whole trace has 94 million).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from ktransformer2.bench import policy_sim as sim
from ktransformer2.bench.corpus import block_trace_path
from ktransformer2.bench.line_plot import terminal_plot
from ktransformer2.bench.outcome import BenchOptions, Outcome, say
from ktransformer2.bench.policy_hints import HintOracle
from ktransformer2.bench.policy_trace import BlockTrace, Interleaving, read_agentic, read_block_trace
from ktransformer2.cache.replacement import POLICIES, make_policy
from ktransformer2.cache.replacement.bands import Bands

SHARES = (0.01, 0.02, 0.05, 0.10, 0.25)
CHAT, SYNTHETIC, AGENTIC = "mooncake_conversation_blocks", "mooncake_synthetic_blocks", "weka_agentic_coding_blocks"
UNTUNED_SEEDS = (11, 12, 13)
_HINT_ACCURACY, _HINT_SHARES, _NUM_HINT_SEEDS = 0.9, (0.02, 0.10), 3
_SCAN_CAPACITY = 1000  # blocks; between two readings of the prefix come 990 others and its own 20
_JUDGED = "adaptive"
_TRACE_PARTS = ("chat", "synthetic", "agentic")
PARTS = (*_TRACE_PARTS, "hints", "scan")
Row = dict[str, object]


@dataclass(frozen=True)
class Bed:
    """A trace, cut where counting begins, with what does not depend on a policy."""

    trace: BlockTrace
    counted_from: int
    num_touches: int
    ceiling: int
    num_unique: int
    optima: dict[int, int] = field(default_factory=dict)
    lru: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: BlockTrace) -> Bed:
        half = len(trace.requests) // 2
        touches = sum(len(request.ids) for request in trace.requests[half:])
        return cls(trace, half, touches, sim.ceiling(trace.requests, half), trace.num_unique)

    def capacity(self, share: float) -> int:
        return max(1, int(share * self.num_unique))

    def optimum(self, capacity: int) -> int:
        if capacity not in self.optima:
            self.optima[capacity] = sim.optimum(self.trace.requests, capacity, self.counted_from)
        return self.optima[capacity]


@dataclass(frozen=True)
class Score:
    """One policy at one capacity of one bed, in hits of the counted half."""

    bed: Bed
    share: float
    policy: str
    hits: int
    us_per_touch: float

    @property
    def percent(self) -> float:
        return 100 * self.hits / self.bed.num_touches

    @property
    def gap_closed(self) -> float:
        """Of the way from LRU to the optimum; 0 where LRU is the optimum."""
        capacity = self.bed.capacity(self.share)
        base = self.bed.lru[capacity]
        gap = self.bed.optimum(capacity) - base
        return (self.hits - base) / gap if gap else 0.0

    @property
    def normalised(self) -> float:
        return self.hits / self.bed.ceiling if self.bed.ceiling else 0.0

    def row(self, part: str) -> Row:
        return {
            "part": part,
            "share": self.share,
            "policy": self.policy,
            "hit_percent": self.percent,
            "optimum": 100 * self.bed.optimum(self.bed.capacity(self.share)) / self.bed.num_touches,
            "normalised": self.normalised,
            "gap_closed": self.gap_closed,
            "us_per_touch": self.us_per_touch,
        }


def _score(bed: Bed, share: float, name: str, make: sim.MakePolicy, after: object = None) -> Score:
    capacity = bed.capacity(share)
    say(f"{bed.trace.name}: {name} at {share:.0%} ({capacity:,} blocks)")
    run = sim.replay(bed.trace.requests, make, capacity, after if callable(after) else None)
    score = Score(bed, share, name, run.hits_from(bed.counted_from), run.us_per_touch)
    if name == "lru":
        bed.lru[capacity] = score.hits
    return score


def _maker(name: str) -> sim.MakePolicy:
    return lambda clock: make_policy(name, clock)


def _banded(name: str) -> sim.MakePolicy:
    return lambda clock: Bands(make_policy(name, clock), clock)


def compare(bed: Bed, shares: Sequence[float], policies: Sequence[str]) -> list[Score]:
    """Every policy at every share; LRU, which the others are measured from, must be the first."""
    assert policies[0] == "lru", f"{policies[0]} is not lru"
    return [_score(bed, share, name, _maker(name)) for share in shares for name in policies]


def compare_hinted(bed: Bed, shares: Sequence[float], seed: int, num_seeds: int) -> list[Score]:
    """The judged policy with hints, one score a share and seed. LRU must have been scored without them."""
    return [
        _score(
            bed,
            share,
            f"{_JUDGED}, hints {number}",
            _banded(_JUDGED),
            HintOracle(bed.trace.requests, _HINT_ACCURACY, seed + number).after,
        )
        for share in shares
        for number in range(num_seeds)
    ]


def _least_gap(scores: Sequence[Score], *shares: float) -> float:
    return min(s.gap_closed for s in scores if s.policy == _JUDGED and s.share in shares)


def below_best(scores: Sequence[Score]) -> list[float]:
    """Points of hit rate that the judged policy lies below the better of LRU and ARC, per bed and share; 0: it does
    not.
    """
    hits: dict[tuple[int, float], dict[str, float]] = {}
    for s in scores:
        hits.setdefault((id(s.bed), s.share), {})[s.policy] = s.percent
    return [max(0.0, max(by["lru"], by["arc"]) - by[_JUDGED]) for by in hits.values()]


def _hint_figures(scores: Sequence[Score]) -> dict[str, float]:
    def mean(share: float, figure: Callable[[Score], float]) -> float:
        return fmean(figure(s) for s in scores if s.share == share)

    return {
        "gap_closed_hints_2pct": mean(0.02, lambda s: s.gap_closed),
        "gap_closed_hints_10pct": mean(0.10, lambda s: s.gap_closed),
        "normalised_hints_10pct": mean(0.10, lambda s: s.normalised),
    }


def _scan_rows(policies: Sequence[str], num_one_off: int) -> list[Row]:
    say(f"a scan of {num_one_off:,} blocks")
    requests = sim.scan_requests(num_one_off)
    return [
        {"part": "scan", "policy": name, "prefix_kept": sim.scan_survival(_maker(name), requests, _SCAN_CAPACITY)}
        for name in policies
    ]


def _own_trace(path: Path, quick: bool) -> Outcome:
    bed = Bed.of(read_block_trace(path))
    scores = compare(bed, (0.02, 0.10) if quick else SHARES, POLICIES)
    _show_plot(bed, scores)
    return Outcome([s.row(bed.trace.name) for s in scores], {}, {"trace": str(path)})


def _show_plot(bed: Bed, scores: Sequence[Score]) -> None:
    points = [(s.policy, 100 * s.share, s.percent) for s in scores]
    plot = terminal_plot(f"hit % by capacity, {bed.trace.name}", "% of unique blocks", points)
    if plot is not None:
        say("\n" + plot)


def run(options: BenchOptions) -> Outcome:
    """The parts asked for. Quick: fewer policies, shares and touches. Figures over all traces need all of them."""
    if options.trace is not None:
        return _own_trace(Path(options.trace), options.quick)
    policies = ("lru", "arc", _JUDGED) if options.quick else POLICIES
    shares = (0.02, 0.10) if options.quick else SHARES
    rows = _scan_rows(policies, 100_000 if options.quick else 1_000_000) if options.wants("scan") else []
    scores = [score for bed in _beds(options) for score in compare(bed, shares, policies)]
    rows += [s.row(s.bed.trace.name) for s in scores]
    summary: dict[str, float] = {}
    if options.wants("chat"):
        of_chat = [s for s in scores if s.bed.trace.name == CHAT]
        _show_plot(of_chat[0].bed, of_chat)
        summary |= _chat_figures(of_chat)
    if all(map(options.wants, _TRACE_PARTS)):
        below = below_best(scores)
        summary |= {"worst_below_best": max(below), "mean_below_best": fmean(below)}
    if options.wants("hints"):
        chat = Bed.of(read_block_trace(block_trace_path(CHAT)))
        compare(chat, _HINT_SHARES, ("lru",))
        hinted = compare_hinted(chat, _HINT_SHARES, options.seed, 1 if options.quick else _NUM_HINT_SEEDS)
        rows += [s.row(f"{CHAT}, hinted") for s in hinted]
        summary |= _hint_figures(hinted)
    return Outcome(rows, summary, {"untuned_seeds": list(UNTUNED_SEEDS), "hint_accuracy": _HINT_ACCURACY})


def _beds(options: BenchOptions) -> Iterator[Bed]:
    """The traces asked for, each read when its turn comes."""
    for part, name in (("chat", CHAT), ("synthetic", SYNTHETIC)):
        if options.wants(part):
            yield Bed.of(read_block_trace(block_trace_path(name)))
    if options.wants("agentic"):
        for seed in UNTUNED_SEEDS[:1] if options.quick else UNTUNED_SEEDS:
            touches = options.num_touches or (200_000 if options.quick else 2_000_000)
            yield Bed.of(read_agentic(block_trace_path(AGENTIC), Interleaving(seed, max_touches=touches)))


def _chat_figures(scores: Sequence[Score]) -> dict[str, float]:
    gaps = {"gap_closed_chat_2pct": (0.01, 0.02), "gap_closed_chat_5pct": (0.05,), "gap_closed_chat_10pct": (0.10,)}
    counted = {s.share for s in scores}
    figures = {key: _least_gap(scores, *shares) for key, shares in gaps.items() if counted.intersection(shares)}
    return figures | {"us_per_touch": median(s.us_per_touch for s in scores if s.policy == _JUDGED)}
