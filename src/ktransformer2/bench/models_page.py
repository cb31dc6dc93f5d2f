"""What became of each model type: as a row, as the page `docs/models.md`, and as the list that the package carries.

Knows no model and runs nothing. The list is what `ktransformer models --architectures` prints, and needs no torch.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformer2.layout import LayerGroup

OUTCOMES = ("served", "refused", "different", "not built")
# The doors for transformers users; the engine is the door that every verdict is about.
DOORS = ("drop-in", "drop-in, gathered", "attach", "attach, warm")
LIST = Path(__file__).parents[1] / "data" / "architectures.json"
MAKE_PAGE = "python -m ktransformer2.bench.architectures"


@dataclass(frozen=True)
class Verdict:
    """What became of a model type. `held_blocks`: per layer group, the most blocks that one sequence held.

    `shut_doors`: those of `DOORS` that refuse what the engine serves, each with its reason. `runner`: whose forward
    pass answered, `lean` or `transformers`.
    """

    model_type: str
    class_name: str
    outcome: str
    reason: str = ""
    groups: tuple[LayerGroup, ...] = ()
    held_blocks: tuple[int, ...] = ()
    near_ties: int = 0
    shut_doors: tuple[tuple[str, str], ...] = ()
    runner: str = ""

    @property
    def groups_text(self) -> str:
        return ", ".join(f"window {group.window}" if group.window else "full" for group in self.groups)

    @property
    def listed(self) -> dict[str, str]:
        """What the package's list says."""
        shut = "; ".join(f"{door}: {reason}" for door, reason in self.shut_doors)
        return {
            "model_type": self.model_type,
            "class": self.class_name,
            "outcome": self.outcome,
            "groups": self.groups_text,
            "runner": self.runner,
            "reason": self.reason or (f"not by every door: {shut}" if shut else ""),
        }

    @property
    def row(self) -> dict[str, object]:
        return {
            **self.listed,
            "held_blocks": ", ".join(map(str, self.held_blocks)),
            "doors": len(DOORS) - len(self.shut_doors) if self.outcome == "served" else 0,
            "near_ties": self.near_ties,
        }


_COLUMNS = {"served": "layer groups | runner", "refused": "reason", "different": "difference", "not built": "reason"}
_HEAD = """# Models

Every model type of `AutoModelForCausalLM` in transformers {transformers} (torch {torch}), tried in a small random copy:
sizes shrunk, structure kept, windows of 16 tokens. `{make}` makes this page,
and a test compares it with a new run. `ktransformer models --architectures` prints the same, with `--json` too.

- **Served**: {served}. The 40 greedy tokens after prompts of 150 and 117 are those of
  `generate` with `DynamicCache` in fp32, from one ragged batch, and the first 20 behind the longer prompt again from
  cached blocks; so is the distance of the two best logits at every token. A model whose two best logits lie too close
  for that is drawn again with other weights.
- **By the doors of transformers' users too**: {doors}.
  The 8 tokens after a prompt of 41, in blocks of 16, are held to the same.
- **Which runner**: `lean` is this package's own forward pass, for {lean}; all others, and a
  model of these types that is unusual in any way, are computed by the modules of `transformers`, untouched.
  `--runner transformers` takes those for every model; for the lean types this page does not try them.
- **Refused**: {refused}. A typed error (`UnsupportedModelError`) while loading, never a wrong answer.
- Answered differently: {different}. Not made by transformers itself: {not_built}.

Layers with a sliding window have block tables of their own. While it answers, a sequence holds as many of their blocks
as the window can reach (2 of 16 tokens for a window of 16), and all of its blocks of the other layers. Models that read
images or sound are served without them: text in, text out. A published model may differ from the default config of its
type; it is examined when it is loaded, and refused by the same rules. Phi-3 and Phi-4 put their cache aside where a
text passes `original_max_position_embeddings`: there the drop-in over pages is a typed error, the gathered copy and
`attach` go on.
"""
_DOORS_IN_WORDS = {
    "drop-in": "`DynamicKVCache` reading pages in place",
    "drop-in, gathered": "over a gathered copy",
    "attach": "an attached model",
    "attach, warm": "the same on what the first call left behind",
}


def models_page(verdicts: Sequence[Verdict]) -> str:
    """`docs/models.md`. The same verdicts on the same versions give the same page."""
    by_outcome = {outcome: [v for v in verdicts if v.outcome == outcome] for outcome in OUTCOMES}
    head = _HEAD.format(
        make=MAKE_PAGE,
        transformers=importlib.metadata.version("transformers"),
        torch=importlib.metadata.version("torch").partition("+")[0],
        served=_counts(by_outcome["served"]),
        doors=_doors(by_outcome["served"]),
        lean=", ".join(v.model_type for v in by_outcome["served"] if v.runner == "lean"),
        refused=_counts(by_outcome["refused"]),
        different=len(by_outcome["different"]),
        not_built=len(by_outcome["not built"]),
    )
    tables = [
        f"\n## {outcome.capitalize()}\n\n{(top := f'| model type | class | {_COLUMNS[outcome]} |')}\n"
        f"{'|---' * (top.count('|') - 1)}|\n"
        + "".join(f"| {v.model_type} | {v.class_name} | {_rest(v)} |\n" for v in found)
        for outcome, found in by_outcome.items()
        if found
    ]
    shut = "".join(
        f"| {v.model_type} | {door} | {reason} |\n" for v in by_outcome["served"] for door, reason in v.shut_doors
    )
    if shut:
        tables.insert(1, f"\n## Served, but not by every door\n\n| model type | door | reason |\n|---|---|---|\n{shut}")
    return head + "".join(tables)


def _rest(verdict: Verdict) -> str:
    return f"{verdict.groups_text} | {verdict.runner}" if verdict.outcome == "served" else verdict.reason


def _counts(verdicts: Sequence[Verdict]) -> str:
    return f"{len(verdicts)} model types, {len({verdict.class_name for verdict in verdicts})} classes"


def _doors(served: Sequence[Verdict]) -> str:
    """How many of the served types each door serves."""
    counts = {door: sum(door not in dict(verdict.shut_doors) for verdict in served) for door in DOORS}
    return ", ".join(f"{_DOORS_IN_WORDS[door]} {count}" for door, count in counts.items())


def as_list(verdicts: Sequence[Verdict]) -> str:
    """The package's list, one model type a line."""
    rows = ",\n".join(f"  {json.dumps(verdict.listed)}" for verdict in verdicts)
    version = importlib.metadata.version("transformers")
    return f'{{\n "transformers": {json.dumps(version)},\n "architectures": [\n{rows}\n ]\n}}\n'


def read_list(path: Path = LIST) -> dict[str, Any]:
    """The package's list: the version of transformers that it is about, and a row for every model type."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
