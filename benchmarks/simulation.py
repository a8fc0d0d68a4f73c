"""The executor against the simulation of its table: stages that sleep, so that ranks do not compete for cores.

A stage sleeps for its forward, for the input's gradient and for the weight's, so what is measured is when the executor
lets actions start. The simulation is fed with the times that the actions took in the same run, by stage and kind, and
with the time of a hop, measured before each round: from the send of one rank to the wake-up of another that waits.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.mesh import p2p
from fivefold.mesh.collectives import sum_values
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.run import Run
from fivefold.observe.recorder import SpanRecorder
from fivefold.observe.spans import Span
from fivefold.observe.timeline import ACTIONS
from fivefold.ops.linear import WeightGradQueue
from fivefold.schedule.auto import auto
from fivefold.schedule.named import SCHEDULES, build
from fivefold.schedule.simulate import Timeline, simulate
from fivefold.schedule.table import Table, owners
from fivefold.wrap.data import Stage
from fivefold.wrap.pipeline import Executor

from .table import Table as Printed

PP = 4
MICROBATCHES = (8, 16)
SLEEP_S = {"F": 0.020, "I": 0.020, "W": 0.020}
"""Of the model's share of a rank; stages of a rank with several chunks have a part of it each."""
GOALS = {1: 1.05, 2: 1.10}
"""Measured over simulated makespan, by chunks."""
ACTIVATION = (64, 256)
HOPS = 20


class _Sleep(torch.autograd.Function):
    """``x`` unchanged. Its backward sleeps for the input's gradient, and for the weight's: at once, or in W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: SleepingPart, queue: WeightGradQueue | None) -> Tensor:
        ctx.part, ctx.queue, ctx.weight = part, queue, weight
        time.sleep(part.sleep_s["F"])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part: SleepingPart = ctx.part
        time.sleep(part.sleep_s["I"])
        if ctx.queue is None:
            return gradients[0], part.weight_gradient(), None, None
        ctx.queue.push(ctx.weight, part.weight_gradient)
        return gradients[0], None, None, None


class SleepingPart(nn.Module):
    """A stage whose work is to sleep; the first makes its input, the last the loss."""

    def __init__(self, run: Run, chunks: int, *, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.sleep_s = {kind: seconds / chunks for kind, seconds in SLEEP_S.items()}
        self._run, self._last = run, last

    def forward(self, x: Tensor | None, microbatch: None) -> Tensor:
        x = torch.zeros(ACTIVATION) if x is None else x
        y: Tensor = _Sleep.apply(x, self.weight, self, self._run.queue)  # type: ignore[assignment]
        return y.mean() if self._last else y

    def weight_gradient(self) -> Tensor:
        """The gradient of ``weight``, after its sleep."""
        time.sleep(self.sleep_s["W"])
        return torch.ones(1)


@dataclass(frozen=True)
class Case:
    """A schedule and what it is run on."""

    name: str
    microbatches: int

    @property
    def chunks(self) -> int:
        return SCHEDULES[self.name].chunks

    @property
    def table(self) -> Table:
        """The named table, or the one that ``auto`` makes for the times slept."""
        if self.name == "auto":
            return auto(PP, self.microbatches, cost=SLEEP_S)
        return build(self.name, PP, self.microbatches)


def send_or_receive(context: RankContext) -> list[float]:
    """When rank 0 sent each of some messages, or rank 1 had it, waiting for it as the executor does; else nothing."""
    axis = context.mesh(f"pp{PP}").pp
    x, times = torch.zeros(ACTIVATION), []
    for _ in range(HOPS if axis.rank < 2 else 0):
        if axis.rank == 0:
            time.sleep(SLEEP_S["F"] / 2)
            times.append(time.perf_counter())
            p2p.send(x, axis, 1).wait()
        else:
            p2p.receive(x, axis, 0).wait()
            times.append(time.perf_counter())
    return times


def measure_hop(pool: Pool) -> float:
    """Seconds from a send to the wake-up of who waits for it: the median of some."""
    sent, received, *_ = pool.run(send_or_receive)
    return statistics.median(b - a for a, b in zip(sent, received, strict=True))


def run_case(context: RankContext, case: Case) -> list[Span]:
    """One step: when this rank's actions and waits were."""
    key = f"executor {case}"
    if key not in context.cache:
        context.cache[key] = _executor(context, case)
        context.cache[key].step([None] * case.microbatches)  # the first also tells what activations are like
    executor: Executor = context.cache[key]
    recorder = executor.run.recorder
    sum_values(torch.zeros(()), executor.run.mesh.world)  # all begin together
    executor.step([None] * case.microbatches)
    return recorder.step_spans()


def _executor(context: RankContext, case: Case) -> Executor:
    table = case.table
    run = Run(context.mesh(f"pp{PP}", SpanRecorder()))
    owner = owners(table)
    stages = {
        stage: Stage({f"{stage}": SleepingPart(run, case.chunks, last=stage == len(owner) - 1)}, run, zero=1)
        for stage, rank in enumerate(owner) if rank == context.rank
    }  # fmt: skip
    return Executor(table, stages, run)


def simulated(table: Table, actions: Sequence[Span], hop_s: float) -> Timeline:
    """The table with every action taking the mean of its kind and stage among ``actions``."""
    took: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for span in actions:
        took[span.kind, span.stage].append(span.end - span.begin)
    mean = {key: statistics.mean(seconds) for key, seconds in took.items()}
    return simulate(table, lambda action: mean[action.kind, action.stage], comm=hop_s)


@dataclass
class Result:
    """The fastest run of a case: its makespan, and that of the simulation with its times. Seconds."""

    measured: float = math.inf
    simulated: float = math.inf

    def take(self, case: Case, ranks: Sequence[Sequence[Span]], hop_s: float) -> None:
        """Keep a run if it was faster. Ranks of one host share a clock, so their spans compare."""
        actions = [span for spans in ranks for span in spans if span.kind in ACTIONS]
        makespan = max(s.end for s in actions) - min(s.begin for s in actions)
        if makespan < self.measured:
            self.measured, self.simulated = makespan, simulated(case.table, actions, hop_s).makespan


def measure(microbatches: Sequence[int], names: Sequence[str], rounds: int, say: Callable[[str], None]) -> Printed:
    """A row for each schedule, 1F1B among them, and number of microbatches; a round goes through all of them."""
    cases = [Case(name, m) for m in microbatches for name in names]
    results, hops = {case: Result() for case in cases}, list[float]()
    with Pool(PP) as pool:
        for i in range(rounds):
            hops.append(hop_s := measure_hop(pool))
            for case in cases:
                say(f"round {i + 1} of {rounds}: {case.name}, {case.microbatches} microbatches")
                results[case].take(case, pool.run(run_case, case), hop_s)
    table = Printed(
        f"Executor against simulation: {PP} ranks that sleep, a hop of {statistics.median(hops) * 1e3:.2f} ms",
        ("schedule", "microbatches", "makespan s", "simulated s", "ratio", "goal", "1F1B's over it", "simulated"),
    )
    for case in cases:
        r, base = results[case], results[Case("1f1b", case.microbatches)]
        ratio, goal = r.measured / r.simulated, GOALS[case.chunks]
        faster = base.measured / r.measured, base.simulated / r.simulated
        table.add(case.name, str(case.microbatches), f"{r.measured:.3f}", f"{r.simulated:.3f}", f"{ratio:.3f}",
                  f"{goal:.2f}", *(f"{x:.3f}" for x in faster),
                  data={"ratio": ratio, "goal": goal, "faster": faster, "hops_s": hops})  # fmt: skip
    return table
