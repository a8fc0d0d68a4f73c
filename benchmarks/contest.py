"""Contestants take turns in processes that stay alive, so that whatever else the machine does falls on all alike.

A round gives every contestant one turn of a few steps, in an order that reverses from round to round. What is compared
is CPU seconds, summed over ranks, of turns in the same round: a busy machine stretches wall time far more. Medians over
the rounds are reported, with the quartiles as spread.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext

WARMUP_STEPS = 2
Build = Callable[..., Callable[[], object]]
"""``build(context, *args)`` makes a contestant in its process and returns its step."""


@dataclass
class Contestant:
    """What is measured, and its samples: one a round, seconds a step."""

    name: str
    pool: Pool
    build: Build
    args: tuple[object, ...]
    cpu_s: list[float] = field(default_factory=list)
    """Summed over ranks."""
    wall_s: list[float] = field(default_factory=list)
    """Of the slowest rank."""

    def turn(self, steps: int) -> None:
        """Run ``steps`` steps and keep what they took."""
        ranks = self.pool.run(take_turn, self.build, self.args, steps)
        self.cpu_s.append(sum(cpu for cpu, _ in ranks) / steps)
        self.wall_s.append(max(wall for _, wall in ranks) / steps)


def take_turn(context: RankContext, build: Build, args: tuple[object, ...], steps: int) -> tuple[float, float]:
    """CPU and wall seconds of ``steps`` steps of one rank; the first turn builds the contestant and warms it up."""
    key = f"contestant {build.__qualname__} {args}"
    if key not in context.cache:
        context.cache[key] = build(context, *args)
        for _ in range(WARMUP_STEPS):
            context.cache[key]()
    step = context.cache[key]
    gc.collect()
    gc.disable()  # for everybody: the training loop collects every 50 steps
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    return time.process_time() - cpu, time.perf_counter() - wall


def compete(contestants: Sequence[Contestant], rounds: int, steps: int, say: Callable[[str], None]) -> None:
    """``rounds`` rounds of ``steps`` steps each."""
    for contestant in contestants:
        contestant.pool.run(take_turn, contestant.build, contestant.args, 1)  # build and warm up
    for i in range(rounds):
        say(f"round {i + 1} of {rounds}")
        for contestant in contestants if i % 2 == 0 else reversed(contestants):
            contestant.turn(steps)


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of the ratios round by round."""
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])
