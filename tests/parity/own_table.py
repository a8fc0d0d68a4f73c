"""Schedules of a user's own: functions that return a table."""

from __future__ import annotations

from fivefold.schedule.table import Action, Table


def upside_down(pp: int, microbatches: int, chunks: int) -> Table:
    """Two microbatches at a time, the first stages on the last rank; every other backward split, its W at once."""
    table: Table = [[] for _ in range(pp)]
    for first in range(0, microbatches, 2):
        pair = range(first, min(first + 2, microbatches))
        for stage in range(pp):
            order = table[pp - 1 - stage]
            order += [Action("F", stage, m) for m in pair]
            for m in pair:
                order += [Action(kind, stage, m) for kind in (("I", "W") if m % 2 else ("B",))]
    return table


def weights_last(pp: int, microbatches: int, chunks: int) -> Table:
    """All forwards, all input gradients, then all weight gradients; stages one after another round the ranks."""
    table: Table = []
    for rank in range(pp):
        stages = [rank + pp * c for c in range(chunks)]
        table.append([])
        for kind, order in (("F", stages), ("I", stages[::-1]), ("W", stages)):
            table[-1] += [Action(kind, stage, m) for stage in order for m in range(microbatches)]
    return table
