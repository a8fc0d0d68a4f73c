"""The automatic schedule: the first steps are measured, and the rest run on the table made for what they took."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from ..mesh import transport
from ..mesh.collectives import max_values
from ..mesh.mesh import Mesh
from ..schedule.plan import MEASURED_STEPS, measures, replanned
from ..schedule.simulate import simulate
from .state import TrainState

FIRST, LAST = 2, MEASURED_STEPS
"""The steps that are measured; the one before warms caches and connections up."""
KINDS = ("F", "I", "W")
HOPS = 5
"""Messages that are timed; the fastest counts."""


class Replanner:
    """Collects the times of actions, and changes the executor's table once, after step ``LAST``.

    Every rank takes part, and all come to the same table, because they reduce what they measured by its maximum.
    """

    def __init__(self, state: TrainState) -> None:
        self._active = measures(state.config) and state.mesh.pp.size > 1
        self._times: defaultdict[tuple[int, str], list[float]] = defaultdict(list)

    def after_step(self, state: TrainState) -> str:
        """Take the step's times; what to tell the user once the table is changed, empty before."""
        if not self._active or state.step < FIRST:
            return ""
        for span in state.mesh.recorder.step_spans():
            if span.kind in KINDS:
                self._times[span.stage, span.kind].append(span.end - span.begin)
        if state.step < LAST:
            return ""
        self._active = False
        cost, hop_s = self._costs(state), hop_time(state)
        table = replanned(state.config, lambda a: cost[a.stage, a.kind], hop_s)
        before = simulate(state.executor.table, lambda a: cost[a.stage, a.kind], hop_s).makespan
        found = simulate(table, lambda a: cost[a.stage, a.kind], hop_s)
        state.executor.use(table)
        n = state.executor.n_stages
        means = ", ".join(f"{kind} {1e3 * sum(cost[s, kind] for s in range(n)) / n:.2f}" for kind in KINDS)
        return (
            f"schedule auto: measured {means} ms a stage on average, {1e3 * hop_s:.2f} ms a message; the new table "
            f"should take {found.makespan / before:.3f} of the first one's time, bubble {found.bubble:.1%}"
        )

    def _costs(self, state: TrainState) -> dict[tuple[int, str], float]:
        """Seconds of each stage's actions, as the slowest of the ranks that run it finds them."""
        keys = [(stage, kind) for stage in range(state.executor.n_stages) for kind in KINDS]
        means = [sum(t) / len(t) if (t := self._times[key]) else 0.0 for key in keys]
        slowest = max_values(torch.tensor(means, dtype=torch.float64, device=state.mesh.device), state.mesh.world)
        cost = dict(zip(keys, slowest.tolist(), strict=True))
        return cost | {(s, "B"): cost[s, "I"] + cost[s, "W"] for s in range(state.executor.n_stages)}


def hop_time(state: TrainState) -> float:
    """Seconds that the largest activation takes from one rank of the pipeline to the next."""
    mesh = state.mesh
    size = max_values(torch.tensor(state.executor.message_bytes(), device=mesh.device), mesh.world)
    found = [_hop(mesh, int(size)) for _ in range(HOPS)]
    return max_values(torch.tensor(min(found), dtype=torch.float64, device=mesh.device), mesh.world).item()


def _hop(mesh: Mesh, size: int) -> float:
    if mesh.pp.size == 1 or not size:
        return 0.0
    x = torch.zeros(size, dtype=torch.uint8, device=mesh.device)
    began = time.perf_counter()
    transport.shift(x, mesh.pp).wait()[0].item()  # reading a value waits for the device
    return time.perf_counter() - began
