"""On one rank: the executor runs a table's actions in order, and tells a stage what each of them completes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.run import Run
from fivefold.observe.recorder import FlightRecorder
from fivefold.ops.linear import WeightGradQueue
from fivefold.schedule.named import build
from fivefold.schedule.streams import one_f_one_b
from fivefold.schedule.table import Action, Table
from fivefold.wrap.data import Stage
from fivefold.wrap.pipeline import Executor, forwards


class Probe:
    """A stage that notes what it is told. It multiplies what it gets by ``w``; the first stage gets the microbatch."""

    def __init__(self, name: str, run: Run, log: list[tuple[Any, ...]]) -> None:
        self.name, self.run, self.log = name, run, log
        self.w = torch.tensor(2.0, requires_grad=True)
        self.tied: list[str] = []

    def tell(self, what: str, **more: bool) -> None:
        s = self.run.recorder.scope
        self.log.append((f"{what} {self.name}", s.stage, s.microbatch, *(name for name in more if more[name])))

    def begin(self) -> None:
        self.tell("begin")

    def prefetch(self, *, backward: bool) -> None:
        self.tell("prefetch", backward=backward)

    def forward(self, x: Tensor | None, microbatch: float, *, backward_follows: bool) -> Tensor:
        self.tell("forward", backward_follows=backward_follows, defers=self.run.queue is not None)
        return self.w * (microbatch if x is None else x)

    def backward(self, y: GradientEdge, gradient: Tensor, *, last: bool, waits: bool) -> None:
        self.tell("backward", last=last, waits=waits, defers=self.run.queue is not None)
        torch.autograd.backward(y, gradient)
        if self.run.queue is not None:
            self.run.queue.push(self.w, self.job)

    def job(self) -> Tensor:
        self.tell("job")
        return torch.zeros_like(self.w)

    def weight_gradients(self, waiting: WeightGradQueue, *, last: bool) -> None:
        self.tell("weights", last=last)
        list(waiting.run())

    def finish(self) -> None:
        self.tell("finish")


def executor(table: Table) -> tuple[Executor, list[Probe]]:
    run, log = Run(Mesh.single(recorder=FlightRecorder())), []
    n_stages = 1 + max(a.stage for a in table[0])
    probes = [Probe(str(i), run, log) for i in range(n_stages)]
    return Executor(table, cast(dict[int, Stage], dict(enumerate(probes))), run), probes


def test_a_step_in_order() -> None:
    run, (probe,) = executor(one_f_one_b(1, 2))
    loss = run.step([3.0, 5.0])
    assert loss.item() == 16.0 and not loss.requires_grad
    assert probe.w.grad is not None and probe.w.grad.item() == 8.0
    assert probe.log == [
        ("begin 0", -1, -1),
        ("prefetch 0", 0, 0), ("forward 0", 0, 0, "backward_follows"),
        ("prefetch 0", 0, 0, "backward"), ("backward 0", 0, 0),
        ("prefetch 0", 0, 1), ("forward 0", 0, 1, "backward_follows"),
        ("prefetch 0", 0, 1, "backward"), ("backward 0", 0, 1, "last"),
        ("finish 0", -1, -1),
    ]  # fmt: skip


def test_two_stages_with_a_split_backward() -> None:
    """Stage 1's weight gradients wait until stage 0's backward is done; stage 0's backward is whole."""
    order = [Action("F", 0, 0), Action("F", 1, 0), Action("I", 1, 0), Action("B", 0, 0), Action("W", 1, 0)]
    run, probes = executor([order])
    assert run.n_stages == 2
    assert run.step([3.0]).item() == 12.0
    assert [p.w.grad.item() for p in probes if p.w.grad is not None] == [6.0, 6.0]
    assert [entry for entry in probes[0].log if not entry[0].startswith("prefetch")] == [
        ("begin 0", -1, -1), ("begin 1", -1, -1),
        ("forward 0", 0, 0), ("forward 1", 1, 0, "backward_follows", "defers"),
        ("backward 1", 1, 0, "waits", "defers"), ("backward 0", 0, 0, "last"),
        ("weights 1", 1, 0, "last"), ("job 1", 1, 0),
        ("finish 0", -1, -1), ("finish 1", -1, -1),
    ]  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("name", ["gpipe", "looped_bfs", "zb_v", "interleaved_split", "zb_h2"])
def test_any_table_of_one_rank_gives_the_same(name: str, microbatches: int) -> None:
    """Each stage hears of its last backward once, and of no job twice."""
    table = build(name, 1, microbatches)
    run, probes = executor(table)
    values = [float(m + 1) for m in range(microbatches)]
    factor = 2.0 ** len(probes)
    assert run.step(values).item() == factor * sum(values)
    for probe in probes:
        assert probe.w.grad is not None and probe.w.grad.item() == factor / 2 * sum(values)
        last = [e for e in probe.log if e[0].endswith(probe.name) and "last" in e]
        assert [(e[1], e[2]) for e in last] == [(int(probe.name), microbatches - 1)]
    jobs = [e for e in probes[0].log if e[0].startswith("job")]
    assert len(jobs) == len(set(jobs)) == sum(a.kind == "W" for a in table[0])


def test_evaluation_builds_no_graph_and_tells_no_step() -> None:
    run, probes = executor(build("zb_v", 1, 2))
    loss = run.evaluate([1.0, 2.0, 4.0])
    assert loss.item() == 28.0 and not loss.requires_grad
    told = [e for e in probes[0].log if not e[0].startswith("prefetch")]
    assert told == [(f"forward {s}", s, m) for s in range(2) for m in range(3)]
    assert all(p.w.grad is None for p in probes)


def test_the_table_of_an_evaluation_goes_stage_by_stage() -> None:
    """In any placement: a rank runs its first stage for all microbatches, then its next."""
    table = forwards([0, 1, 1, 0], 2)
    assert [" ".join(map(str, order)) for order in table] == ["F0.0 F0.1 F3.0 F3.1", "F1.0 F1.1 F2.0 F2.1"]


def test_losses_add_up_in_float64_whatever_their_dtype() -> None:
    """The same on every rank of a pipeline, also on those that see no loss."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        run, (probe,) = executor(one_f_one_b(1, 2))
        probe.w = cast(Any, torch.tensor(1.0, dtype=dtype, requires_grad=True))
        loss = run.step([1.0, 2.0**-8])
        assert loss.dtype == torch.float64 and loss.item() == 1.0 + 2.0**-8
    run, _ = executor(one_f_one_b(1, 1))
    assert run.evaluate([]).dtype == torch.float64


def test_messages_tell_their_largest_activation() -> None:
    run, _ = executor(one_f_one_b(1, 1))
    run.step([1.0])
    assert run.message_bytes() == 0  # nothing leaves the only rank
