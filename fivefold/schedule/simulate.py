"""What a table costs: when each action runs, the bubble, and the memory that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from .cost import UNIT, Cost, price
from .table import Action, Table, owners, play

__all__ = ["UNIT", "Cost", "Timeline", "price", "simulate"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated run of a table. Times are in the unit of the costs."""

    start: dict[Action, float]
    end: dict[Action, float]
    makespan: float
    """Last end minus first start over all ranks: the step's time when the optimizer waits for every rank."""
    span: float
    """The longest time from one rank's first start to its last end: the step's time when ranks do not wait for each
    other between steps, which is what the zero-bubble papers publish."""
    busy: float
    """The work of the busiest rank."""
    peak: tuple[float, ...]
    """The most that each rank holds at once, in activations of one microbatch in one stage; what waits for W counts."""
    deferred: tuple[float, ...]
    """The most that each rank holds for W actions alone that wait while another action runs, in the same unit."""

    @property
    def bubble(self) -> float:
        """The share of the makespan in which the busiest rank idles."""
        return 1 - self.busy / self.makespan if self.makespan else 0.0

    @property
    def span_bubble(self) -> float:
        """The share of the span in which the busiest rank idles."""
        return 1 - self.busy / self.span if self.span else 0.0


def simulate(table: Table, cost: Cost = UNIT, comm: float = 0.0, weight_memory: float = 1.0) -> Timeline:
    """Play a table: an action starts when its rank is free and what it needs is there.

    Args:
        comm: time of a message from one rank to another; it occupies neither.
        weight_memory: the share of an activation that I leaves for W.
    Raises:
        ValueError: naming what each rank waits for, if the table deadlocks.
    """
    owner, of = owners(table), price(cost)
    steps, waits = play(table)
    if waits:
        raise ValueError(f"The table deadlocks: {'; '.join(map(str, waits))}.")
    n = len(table)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    clock, busy, held, peak = [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    waiting, deferred = [0] * n, [0] * n
    change = {"F": 1.0, "B": -1.0, "I": weight_memory - 1.0, "W": -weight_memory}
    for rank, action, required in steps:
        begin = clock[rank]
        for a in required:
            begin = max(begin, end[a] + (comm if owner[a.stage] != rank else 0.0))
        took = of(action)
        start[action] = begin
        clock[rank] = end[action] = begin + took
        busy[rank] += took
        held[rank] += change[action.kind]
        peak[rank] = max(peak[rank], held[rank])
        waiting[rank] -= action.kind == "W"
        deferred[rank] = max(deferred[rank], waiting[rank])
        waiting[rank] += action.kind == "I"
    spans = (end[order[-1]] - start[order[0]] for order in table if order)
    return Timeline(
        start=start,
        end=end,
        makespan=max(end.values(), default=0.0) - min(start.values(), default=0.0),
        span=max(spans, default=0.0),
        busy=max(busy, default=0.0),
        peak=tuple(peak),
        deferred=tuple(weight_memory * most for most in deferred),
    )
