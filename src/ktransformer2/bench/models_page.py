"""What became of each model type, as a row and as the page `docs/models.md`. Knows no model and runs nothing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass

from ktransformer2.layout import LayerGroup

OUTCOMES = ("served", "refused", "different", "not built")


@dataclass(frozen=True)
class Verdict:
    """What became of a model type. `held_blocks`: per layer group, the most blocks that one sequence held."""

    model_type: str
    class_name: str
    outcome: str
    reason: str = ""
    groups: tuple[LayerGroup, ...] = ()
    held_blocks: tuple[int, ...] = ()
    near_ties: int = 0

    @property
    def groups_text(self) -> str:
        return ", ".join(f"window {group.window}" if group.window else "full" for group in self.groups)

    @property
    def row(self) -> dict[str, object]:
        return {
            "model_type": self.model_type,
            "class": self.class_name,
            "outcome": self.outcome,
            "groups": self.groups_text,
            "held_blocks": ", ".join(map(str, self.held_blocks)),
            "near_ties": self.near_ties,
            "reason": self.reason,
        }


_COLUMNS = {"served": "layer groups", "refused": "reason", "different": "difference", "not built": "reason"}
_HEAD = """# Models

Every model type of `AutoModelForCausalLM` in transformers {transformers} (torch {torch}), tried in a small random copy:
sizes shrunk, structure kept, windows of 16 tokens. `python -m ktransformer2.bench.architectures > docs/models.md` makes
this page, and a test compares it with a new run.

- **Served**: {served}. The 40 greedy tokens after prompts of 150 and 117 are those of
  `generate` with `DynamicCache` in fp32, from one ragged batch and again from cached blocks; so is the distance of the
  two best logits at every token.
- **Refused**: {refused}. A typed error (`UnsupportedModelError`) while loading, never a wrong answer.
- Answered differently: {different}. Not made by transformers itself: {not_built}.

Layers with a sliding window have block tables of their own. While it answers, a sequence holds as many of their blocks
as the window can reach (2 of 16 tokens for a window of 16), and all of its blocks of the other layers. Models that read
images or sound are served without them: text in, text out. A published model may differ from the default config of its
type; it is examined when it is loaded, and refused by the same rules.
"""


def models_page(verdicts: Sequence[Verdict]) -> str:
    """`docs/models.md`. The same verdicts on the same versions give the same page."""
    by_outcome = {outcome: [v for v in verdicts if v.outcome == outcome] for outcome in OUTCOMES}
    head = _HEAD.format(
        transformers=importlib.metadata.version("transformers"),
        torch=importlib.metadata.version("torch").partition("+")[0],
        served=_counts(by_outcome["served"]),
        refused=_counts(by_outcome["refused"]),
        different=len(by_outcome["different"]),
        not_built=len(by_outcome["not built"]),
    )
    tables = [
        f"\n## {outcome.capitalize()}\n\n| model type | class | {_COLUMNS[outcome]} |\n|---|---|---|\n"
        + "".join(f"| {v.model_type} | {v.class_name} | {v.groups_text or v.reason} |\n" for v in found)
        for outcome, found in by_outcome.items()
        if found
    ]
    return head + "".join(tables)


def _counts(verdicts: Sequence[Verdict]) -> str:
    return f"{len(verdicts)} model types, {len({verdict.class_name for verdict in verdicts})} classes"
