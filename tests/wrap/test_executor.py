"""The executor runs a rank's actions in order, and tells a stage which backward completes its gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.run import Run
from fivefold.observe.recorder import FlightRecorder
from fivefold.schedule.table import accumulate
from fivefold.wrap.data import Stage
from fivefold.wrap.pipeline import Executor


class Probe:
    """A stage that notes what it is told. Its loss is ``w`` times the microbatch."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder, self.told, self.last_backward = recorder, [], False
        self.w = torch.tensor(2.0, requires_grad=True)
        self.w.register_hook(lambda g: self.tell("gradient"))

    def tell(self, what: str) -> None:
        s = self.recorder.scope
        self.told.append((what, s.stage, s.microbatch, s.phase, self.last_backward))

    def begin(self) -> None:
        self.tell("begin")

    def forward(self, x: None, microbatch: float) -> Tensor:
        self.tell("forward")
        return self.w * microbatch

    def end_backward(self) -> None:
        self.tell("end")

    def finish(self) -> None:
        self.tell("finish")


def executor(microbatches: int) -> tuple[Executor, Probe]:
    recorder = FlightRecorder()
    probe = Probe(recorder)
    stages = cast(dict[int, Stage], {0: probe})
    return Executor(accumulate(microbatches), stages, Run(Mesh.single(recorder=recorder))), probe


def test_a_step_in_order() -> None:
    run, probe = executor(2)
    loss = run.step([3.0, 5.0])
    assert loss.item() == 16.0 and not loss.requires_grad and loss.dtype == torch.float32
    assert probe.w.grad is not None and probe.w.grad.item() == 8.0
    assert probe.told == [
        ("begin", -1, -1, "", False),
        ("forward", 0, 0, "", False), ("gradient", 0, 0, "backward", False), ("end", 0, 0, "backward", False),
        ("forward", 0, 1, "", False), ("gradient", 0, 1, "backward", True), ("end", 0, 1, "backward", True),
        ("finish", -1, -1, "", False),
    ]  # fmt: skip


def test_evaluation_builds_no_graph_and_tells_no_step() -> None:
    run, probe = executor(1)
    loss = run.evaluate([1.0, 2.0, 4.0])
    assert loss.item() == 14.0 and not loss.requires_grad
    assert [what for what, *_ in probe.told] == ["forward"] * 3 and probe.w.grad is None


def test_losses_keep_a_wide_dtype() -> None:
    """Half precision losses add up in float32, float64 ones in float64."""
    run, probe = executor(2)
    probe.w = cast(Any, torch.tensor(1.0, dtype=torch.float64, requires_grad=True))
    assert run.step([1.0, 1e-12]).dtype == torch.float64
    probe.w = torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True)
    assert run.step([1.0, 1.0]).dtype == torch.float32
