"""The published table of zero-bubble schedules, simulated: ``python -m tests.schedule.zb_table`` prints it.

``zb_table.csv`` holds the profiled times per action and the bubble rates (of the span) of Qi et al. 2023, arXiv
2401.10241, tables 5 and 9, whose T_B is our I. How much memory ZB-1p and ZB-2p may use is that paper's too: p and 2p
activations, of which I leaves 32/(34 + 5as/h) for W (table 1; a heads, h hidden size, s = 1024 tokens, of table 3).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fivefold.schedule import streams
from fivefold.schedule.auto import auto
from fivefold.schedule.simulate import Timeline, simulate
from fivefold.schedule.table import Table

MODELS = {"1.5B": (24, 2304), "6.2B": (32, 4096), "28.3B": (48, 6144)}
"""Attention heads and hidden size."""
CHUNKS = {"1.5B": 3, "6.2B": 4, "28.3B": 2}
"""Of 1F1B-I: a layer in each, with 24, 32 and 64 layers."""
TOLERANCE = {"1F1B": 1e-4, "ZB-H1": 1e-4, "ZB-H2": 1e-4, "ZB-1p": 1e-3, "ZB-2p": 1e-3, "1F1B-I": 3e-3}


@dataclass(frozen=True)
class Row:
    """One published bubble rate and the table that it is of."""

    model: str
    pp: int
    microbatches: int
    schedule: str
    cost: dict[str, float]
    comm: float
    published: float

    @property
    def weight_memory(self) -> float:
        heads, hidden = MODELS[self.model]
        return 32 / (34 + 5 * heads * 1024 / hidden)

    @property
    def limit(self) -> float | None:
        return {"ZB-1p": 1.0 * self.pp, "ZB-2p": 2.0 * self.pp}.get(self.schedule)

    @cached_property
    def table(self) -> Table:
        if self.limit is not None:
            return auto(self.pp, self.microbatches, cost=self.cost, comm=self.comm, limit=self.limit,
                        weight_memory=self.weight_memory, objective="span")  # fmt: skip
        if self.schedule == "1F1B-I":
            return streams.interleaved(self.pp, self.microbatches, CHUNKS[self.model])
        named = {"1F1B": streams.one_f_one_b, "ZB-H1": streams.zb_h1, "ZB-H2": streams.zb_h2}
        return named[self.schedule](self.pp, self.microbatches)

    @cached_property
    def timeline(self) -> Timeline:
        chunks = CHUNKS[self.model] if self.schedule == "1F1B-I" else 1
        cost = {kind: time / chunks for kind, time in self.cost.items()}
        return simulate(self.table, cost, self.comm, self.weight_memory)

    @property
    def error(self) -> float:
        return self.timeline.span_bubble - self.published


def rows() -> Iterator[Row]:
    """Every row of the published table."""
    text = (Path(__file__).parent / "zb_table.csv").read_text()
    for line in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        cost = {"F": float(line["T_F"]), "I": float(line["T_B"]), "W": float(line["T_W"])}
        yield Row(line["model"], int(line["stages_p"]), int(line["microbatches_m"]), line["schedule"], cost,
                  float(line["T_comm"]), float(line["bubble_rate_published"]))  # fmt: skip


def print_table() -> None:
    """The table in Markdown."""
    heads = ("model", "ranks", "microbatches", "schedule", "published", "simulated", "difference", "makespan bubble")
    print(f"| {' | '.join(heads)} |\n|---|--:|--:|---|--:|--:|--:|--:|")
    for row in rows():
        rates = f"{row.published:.4f} | {row.timeline.span_bubble:.4f} | {row.error:+.5f} | {row.timeline.bubble:.4f}"
        print(f"| {row.model} | {row.pp} | {row.microbatches} | {row.schedule} | {rates} |")


if __name__ == "__main__":
    print_table()
