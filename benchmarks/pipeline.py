"""Our executor against torch's ``torch.distributed.pipelining``: the same blocks, weights, microbatches and schedule.

Measured is what an executor does: forwards, backwards and messages of one step, gradients summed over microbatches in
the parameters. There is no optimizer step. Gradients are compared before anything is timed. Memory is the peak, within
a step, of the bytes of tensors that live on a rank, whoever made them and whatever for: buffers for messages that a
side keeps between steps count.

Shapes: B sequences of a microbatch, T tokens of a sequence, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.run import Run
from fivefold.observe.recorder import SpanRecorder
from fivefold.ops.linear import linear
from fivefold.schedule.named import build
from fivefold.schedule.table import owners
from fivefold.tools.compare import relative_error
from fivefold.wrap.data import Stage
from fivefold.wrap.pipeline import Executor

from .contest import Contestant, compete, ratio
from .live import Live
from .table import Table, seconds

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_split": ScheduleInterleavedZeroBubble,
    "looped_bfs": ScheduleLoopedBFS,
    "zb_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}
"""Ours, and torch's of the same kind."""
SINGLE = (ScheduleGPipe, Schedule1F1B)
BLOCKS, WIDTH, HEADS, LENGTH, SEQUENCES = 8, 256, 4, 128, 1
MICROBATCHES = 8
TOLERANCE = 1e-5
GOAL = "1"
"""Ours over torch's, of CPU seconds, wall seconds and memory alike."""


@dataclass
class Microbatch:
    """What the first block starts from and what the loss compares with, each where it is used. ``[B, T, D]``"""

    x: Tensor | None
    target: Tensor | None


class Block(nn.Module):
    """A transformer block of plain operators; its matrices go through ``linear``, which without a queue is torch's."""

    def __init__(self, run: Run, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = _matrix(3 * WIDTH, WIDTH), _matrix(WIDTH, WIDTH)
        self.up, self.down = _matrix(4 * WIDTH, WIDTH), _matrix(WIDTH, 4 * WIDTH)
        self._run = run

    def forward(self, x: Tensor | None, microbatch: Microbatch | None = None) -> Tensor:
        if x is None:
            assert microbatch is not None and microbatch.x is not None
            x = microbatch.x
        queue = self._run.queue
        q, k, v = linear(self.norm1(x), self.qkv, queue).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(attended, self.out, queue)
        return x + linear(F.gelu(linear(self.norm2(x), self.up, queue)), self.down, queue)


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) / columns**0.5)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """A share of the mean square over the whole batch."""
    return (y - target).square().sum() / (MICROBATCHES * target.numel())


class Loss(nn.Module):
    """The last part of ours."""

    def forward(self, y: Tensor, microbatch: Microbatch) -> Tensor:
        assert microbatch.target is not None
        return loss_of(y, microbatch.target)


def _batch(context: RankContext, owner: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
    """Inputs and targets of all microbatches, on the ranks of the first and of the last stage."""
    ends = zip((1, 2), (owner[0], owner[-1]), strict=True)
    shape = MICROBATCHES * SEQUENCES, LENGTH, WIDTH
    x, target = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) if rank == context.rank else None
                 for seed, rank in ends)  # fmt: skip
    return x, target


def _blocks_of(stage: int, n_stages: int) -> range:
    each = BLOCKS // n_stages
    return range(stage * each, (stage + 1) * each)


def build_ours(context: RankContext, name: str) -> Callable[[], Tensor]:
    """A step of ours, on the table of the schedule."""
    return _ours(context, name)[1]


def _ours(context: RankContext, name: str) -> tuple[dict[int, Stage], Callable[[], Tensor]]:
    table = build(name, context.world, MICROBATCHES)
    run = Run(context.mesh(f"pp{context.world}", SpanRecorder()))  # as a training run has it
    owner = owners(table)
    stages: dict[int, Stage] = {}
    for stage, rank in enumerate(owner):
        if rank == context.rank:
            parts: dict[str, nn.Module] = {str(i): Block(run, i) for i in _blocks_of(stage, len(owner))}
            stages[stage] = Stage(parts | ({"loss": Loss()} if stage == len(owner) - 1 else {}), run, zero=1)
    executor = Executor(table, stages, run)
    halves = ([None] * MICROBATCHES if each is None else each.chunk(MICROBATCHES) for each in _batch(context, owner))
    microbatches = [Microbatch(*pair) for pair in zip(*halves, strict=True)]
    return stages, lambda: executor.step(microbatches)


def build_torch(context: RankContext, name: str) -> Callable[[], None]:
    """A step of torch's, with its schedule of the same kind."""
    return _torch(context, name)[1]


def _torch(context: RankContext, name: str) -> tuple[list[nn.Module], Callable[[], None]]:
    schedule = SCHEDULES[name]
    owner = owners(build(name, context.world, MICROBATCHES))  # the placement is the same
    run = Run(Mesh.single())
    modules, stages = [], []
    for stage, rank in enumerate(owner):
        if rank == context.rank:
            module = nn.Sequential()
            for i in _blocks_of(stage, len(owner)):
                module.add_module(str(i), Block(run, i))
            modules.append(module)
            stages.append(PipelineStage(module, stage, len(owner), torch.device("cpu")))
    runner = schedule(stages[0] if schedule in SINGLE else stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    x, target = _batch(context, owner)
    given = () if x is None else (x,)

    def step() -> None:
        for module in modules:
            module.zero_grad()
        runner.step(*given, target=target, return_outputs=False)

    return modules, step


def check_gradients(context: RankContext, name: str) -> float:
    """The largest relative difference between gradients of the two on this rank, after a step of each.

    Raises:
        AssertionError: if it is above ``TOLERANCE``, or if the two do not have the same parameters.
    """
    stages, ours = _ours(context, name)
    modules, theirs = _torch(context, name)
    ours()
    theirs()
    want = {n: p.grad for module in modules for n, p in module.named_parameters()}
    got = {s.piece.name: s.value.grad for stage in stages.values() for s in stage.shards}
    assert set(got) == set(want), f"{sorted(set(got) ^ set(want))} are parameters of one side only"
    worst = 0.0
    for parameter, expected in want.items():
        found = got[parameter]
        assert found is not None and expected is not None
        worst = max(worst, relative_error(found.view_as(expected), expected))
    assert worst < TOLERANCE, f"gradients differ by {worst:.1e}"
    return worst


def peak_bytes(context: RankContext, name: str, make: Callable[..., Callable[[], object]]) -> int:
    """Bytes of tensors alive at the peak of a step, of one side from its making on."""
    with Live() as live:
        step = make(context, name)
        step()
        live.peak = live.now
        step()
    return live.peak


def measure(worlds: Sequence[int], names: Sequence[str], rounds: int, steps: int, say: Callable[[str], None]) -> Table:
    """Two rows for each number of ranks and schedule."""
    table = Table(
        f"Executor against torch.distributed.pipelining on gloo: {MICROBATCHES} microbatches; goal of ratios: {GOAL}",
        ("ranks", "schedule", "executor", "CPU s", "CPU ratio", "wall s", "wall ratio", "peak MiB", "peak ratio"),
    )
    for world in worlds:
        with Pool(world) as pool:
            for name in names:
                tell = partial(_tell, say, f"{world} ranks, {name}")
                tell("gradients and memory")
                pool.run(check_gradients, name)
                peaks = [max(pool.run(peak_bytes, name, make)) for make in (build_torch, build_ours)]
                theirs = Contestant("torch", pool, build_torch, (name,))
                ours = Contestant("ours", pool, build_ours, (name,))
                compete([theirs, ours], rounds, steps, tell)
                _add(table, (str(world), name), theirs, ours, peaks)
    return table


def _tell(say: Callable[[str], None], where: str, text: str) -> None:
    say(f"{where}: {text}")


def _add(table: Table, row: tuple[str, str], theirs: Contestant, ours: Contestant, peaks: Sequence[int]) -> None:
    """The rows of both sides, whose largest peaks of a rank are given in bytes."""
    cpu, wall, memory = ratio(ours.cpu_s, theirs.cpu_s), ratio(ours.wall_s, theirs.wall_s), peaks[1] / peaks[0]
    shown = [f"{peak / 2**20:.1f}" for peak in peaks]
    table.add(*row, theirs.name, seconds(theirs.cpu_s), "", seconds(theirs.wall_s), "", shown[0], "")
    table.add(
        *row, ours.name, seconds(ours.cpu_s), str(cpu), seconds(ours.wall_s), str(wall), shown[1], f"{memory:.3f}",
        data={"cpu_ratio": asdict(cpu), "wall_ratio": asdict(wall), "memory_ratio": memory, "rounds": len(ours.cpu_s)},
    )  # fmt: skip
