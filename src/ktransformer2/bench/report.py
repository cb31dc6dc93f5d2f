"""Results as tables in the terminal. Knows no scenario and writes no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktransformer2.bench.targets import targets_of


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the union of their columns, in order of first sight; numbers to the right. Empty for no rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)] if rows else []
    numeric = [all(isinstance(row.get(c), int | float | None) for row in rows) for c in columns]

    def join(parts: Sequence[str]) -> str:
        fields = (p.rjust(w) if n else p.ljust(w) for p, w, n in zip(parts, widths, numeric, strict=True))
        return "  ".join(fields).rstrip()

    return "\n".join(join(line) for line in [columns, *cells]) if rows else ""


def tables_by_part(rows: Sequence[Mapping[str, object]]) -> str:
    """One table for each value of the column `part`, so that rows of one shape stand together."""
    parts: dict[object, list[Mapping[str, object]]] = {}
    for row in rows:
        parts.setdefault(row.get("part", ""), []).append({k: v for k, v in row.items() if k != "part"})
    return "\n\n".join(f"{part}\n{table(group)}" if part else table(group) for part, group in parts.items())


def summary_table(bench: str, summary: Mapping[str, float]) -> str:
    """Every measured key with its value, its target and a verdict."""
    known = targets_of(bench)
    return table(
        [
            {
                "key": key,
                "value": value,
                "target": known[key].text,
                "state": "green" if known[key].holds(value) else "RED",
            }
            for key, value in summary.items()
        ]
    )


def status_table(status: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole status, one key a line."""
    rows = []
    for name, entry in status.items():
        bound = entry["relation"] if entry["target"] is None else f"{entry['relation']} {entry['target']:g}"
        measured = entry["measured"] or {}
        where = " ".join(filter(None, (measured.get("at", "")[:10], measured.get("dtype"), measured.get("kernels"))))
        value = "" if entry["value"] is None else f"{entry['value']:.4g}"
        rows.append({"key": name, "target": bound, "value": value, "state": entry["state"], "measured": where})
    return table(rows)
