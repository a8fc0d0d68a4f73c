"""Tables that are Markdown on a terminal, and JSON for scripts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def seconds(values: Sequence[float]) -> str:
    """The median of ``values`` in seconds, as text."""
    return f"{statistics.median(values):.3f}"


@dataclass
class Table:
    """A title, column names, and rows of text; a row can carry its numbers along for JSON."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    data: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, *cells: str, data: Mapping[str, Any] | None = None) -> None:
        """Append a row."""
        assert len(cells) == len(self.columns)
        self.rows.append(cells)
        self.data.append({**dict(zip(self.columns, cells, strict=True)), **(data or {})})

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in [tuple(self.columns), *self.rows]) for i in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)) + " |"

        rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
        return "\n".join([f"{self.title}\n", line(self.columns), rule, *map(line, self.rows)])
