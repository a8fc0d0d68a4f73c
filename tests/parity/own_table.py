"""Schedules of a user's own: functions that return a table."""

from __future__ import annotations

from fivefold.schedule.table import Action, Kind, Table

WHOLE: tuple[Kind, ...] = ("B",)
SPLIT: tuple[Kind, ...] = ("I", "W")


def upside_down(pp: int, microbatches: int, chunks: int) -> Table:
    """Two microbatches at a time, the first stages on the last rank; every other backward split, its W at once."""
    table: Table = [[] for _ in range(pp)]
    for first in range(0, microbatches, 2):
        pair = range(first, min(first + 2, microbatches))
        for stage in range(pp):
            order = table[pp - 1 - stage]
            order += [Action("F", stage, m) for m in pair]
            for m in pair:
                order += [Action(kind, stage, m) for kind in (SPLIT if m % 2 else WHOLE)]
    return table


def weights_last(pp: int, microbatches: int, chunks: int) -> Table:
    """All forwards, all input gradients, then all weight gradients; stages one after another round the ranks."""
    table: Table = []
    for rank in range(pp):
        stages = [rank + pp * c for c in range(chunks)]
        table.append([])
        table[-1] += [Action("F", stage, m) for stage in stages for m in range(microbatches)]
        for kind in SPLIT:
            table[-1] += [Action(kind, stage, m) for stage in reversed(stages) for m in range(microbatches)]
    return table
