"""Schedules as data: what an action is, and the table that says which rank runs which actions in which order."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One unit of work on one stage for one microbatch. Prints as ``F0.3``: forward, stage 0, microbatch 3."""

    kind: Kind
    """F forward, B full backward; or its two halves: I the input's gradient, W the weights' gradients."""
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Table = list[list[Action]]
"""``table[rank]`` lists that rank's actions in order."""


def accumulate(microbatches: int) -> Table:
    """Gradient accumulation as the schedule of one stage: each microbatch forward, then backward.

    What a pipeline of one rank runs: at most one microbatch's activations are alive.
    """
    return [[Action(kind, 0, m) for m in range(microbatches) for kind in ("F", "B")]]


def last_backwards(order: list[Action]) -> set[Action]:
    """The actions of one rank after which a stage's gradients are complete: its last B or W."""
    last: dict[int, Action] = {a.stage: a for a in order if a.kind in "BW"}
    return set(last.values())
