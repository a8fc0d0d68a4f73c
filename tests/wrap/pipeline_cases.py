"""What the tests of the pipeline run on each rank of a pool."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fivefold.config.model import DecoderConfig
from fivefold.config.run import RunConfig
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.process import set_step_timeouts
from fivefold.mesh.run import Run
from fivefold.observe.progress import Progress
from fivefold.observe.recorder import FlightRecorder
from fivefold.ops.linear import WeightGradQueue
from fivefold.schedule.messages import Receive, Send
from fivefold.schedule.named import build
from fivefold.schedule.plan import plan
from fivefold.schedule.table import Table, owners
from fivefold.tools.compare import gather_whole
from fivefold.train.state import TrainState, build_state
from fivefold.train.step import train_step
from fivefold.wrap import pipeline
from fivefold.wrap.buffer import Precision
from fivefold.wrap.data import Stage
from fivefold.wrap.entries import collect
from fivefold.wrap.pipeline import Executor, MessageError

from .cases import batches

# ---- a run of the library's model ------------------------------------------------------------------------------------


def built(context: RankContext, config: RunConfig, recorder: FlightRecorder | None = None) -> TrainState:
    """The model of ``config`` on this rank."""
    return build_state(config, context.mesh(config.parallel, recorder, plan(config).ends))


@dataclass
class Stepped:
    """What one step found, whole, before any clipping or update."""

    loss: float
    gradients: dict[str, Tensor]
    jobs: int
    """Weight gradients that waited for a W."""


def stepped(context: RankContext, config: RunConfig) -> Stepped:
    """One forward and backward of the hard rows."""
    state, jobs = built(context, config), []
    source = batches(config, state.mesh)
    batch = source.batch(source.rows(1))
    real = WeightGradQueue._run_next

    def run_next(self: WeightGradQueue) -> Any:
        jobs.append(1)
        return real(self)

    with patch.object(WeightGradQueue, "_run_next", run_next):
        loss = state.executor.step(batch.microbatches)
    source.close()
    assert len(state.executor._queue) == 0
    whole = gather_whole(state, lambda s: torch.zeros_like(s.value) if s.value.grad is None else s.value.grad)
    assert whole.owners and whole.replicas
    return Stepped(loss.item(), whole.tensors, len(jobs))


def trained(context: RankContext, config: RunConfig, schedules: tuple[str, ...]) -> tuple[list[float], Any]:
    """A step under each schedule, in one run: the losses, and the whole parameters after it."""
    state, losses = built(context, config), []
    source = batches(config, state.mesh)
    for step, name in enumerate(schedules, start=1):
        state.executor.use(build(name, config.dims.pp, config.train.microbatches, config.pipeline.chunks))
        losses.append(train_step(state, source.batch(source.rows(step))).loss.item())
    source.close()
    return losses, gather_whole(state, lambda s: s.piece.data).tensors


@dataclass
class Posted:
    """The messages of a step, as (op, bytes, stage, microbatch), and those that the table implies."""

    seen: list[tuple[str, int, int, int]]
    derived: list[tuple[str, int, int, int]]
    first: int
    """Events of the first step, which also tells what activations are like."""
    forms: int
    evaluated: list[tuple[str, int, int, int]]


def posted(context: RankContext, config: RunConfig) -> Posted:
    """Two steps and an evaluation, recorded."""
    recorder = FlightRecorder()
    state = built(context, config, recorder)
    source = batches(config, state.mesh)

    def seen() -> list[tuple[str, int, int, int]]:
        moved = [e for e in recorder.events if e.op in ("send", "receive")]
        assert all((e.sent if e.op == "send" else e.received) > 0 == min(e.sent, e.received) for e in moved)
        assert all(e.axis == "pp" and e.size == config.dims.pp for e in moved)
        return [(e.op, e.sent + e.received, e.scope.stage, e.scope.microbatch) for e in moved]

    train_step(state, source.batch(source.rows(1)))
    first = len(seen())
    batch = source.batch(source.rows(2))
    recorder.clear()
    train_step(state, batch)
    assert isinstance(config.model, DecoderConfig)
    data, width = config.data, config.model.dim
    rows = data.batch_size // config.dims.data // config.train.microbatches
    size = 8 * rows * data.sequence_length // config.dims.tp * width
    derived = []
    for item in state.executor._program.items:
        if isinstance(item, Send):
            derived.append(("send", size, *item.message.producer[1:]))
        elif isinstance(item, Receive):
            derived.append(("receive", size, *item.message.consumer[1:]))
    trained = seen()
    recorder.clear()
    state.executor.evaluate(batch.microbatches)
    source.close()
    return Posted(trained, derived, first, len(state.executor._forms), seen())


# ---- stages of hand-made parts ---------------------------------------------------------------------------------------


class Microbatch(SimpleNamespace):
    """Rows of one microbatch, and which one it is."""

    tokens: Tensor
    index: int


def microbatches(n: int, rows: int = 2) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(n)
    return [
        Microbatch(index=i, tokens=torch.randn(rows, 3, dtype=torch.float64, generator=generator)) for i in range(n)
    ]


class Part(nn.Module):
    """A linear map; the last stage returns the sum of its squares."""

    def __init__(self, run: Run, stage: int, n_stages: int, acts: Callable[[int, Microbatch, Tensor], Tensor]) -> None:
        super().__init__()
        self.run, self.stage, self.n_stages, self.acts = run, stage, n_stages, acts
        self.weight = nn.Parameter(
            torch.randn(3, 3, generator=torch.Generator().manual_seed(stage), dtype=torch.float64)
        )

    def forward(self, x: Tensor | None, mb: Microbatch) -> Tensor:
        y = self.acts(self.stage, mb, _map(mb.tokens if x is None else x, self.weight, self.run.queue))
        return y if self.stage + 1 < self.n_stages else y.square().sum()


def _map(x: Tensor, weight: Tensor, queue: WeightGradQueue | None) -> Tensor:
    return _Held.apply(x, weight, Activation.make(), queue)  # type: ignore[return-value]


class Activation:
    """Stands for what one forward leaves for its backward; counts how many live."""

    living: weakref.WeakSet[Activation] = weakref.WeakSet()
    peak = 0

    @classmethod
    def make(cls) -> Activation:
        made = cls()
        cls.living.add(made)
        cls.peak = max(cls.peak, len(cls.living))
        return made


class _Held(torch.autograd.Function):
    """``x @ weight.T``, whose backward, or whose waiting weight gradient, holds an :class:`Activation`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, held: Activation, queue: WeightGradQueue | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.held, ctx.queue, ctx.parameter = held, queue, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight), held = gradients, ctx.saved_tensors, ctx.held
        job = lambda: grad.t() @ x if held is not None else grad  # noqa: E731  holds the activation until it has run
        grad_weight = job() if ctx.queue is None else None
        if ctx.queue is not None:
            ctx.queue.push(ctx.parameter, job)
        return grad @ weight, grad_weight, None, None


def unchanged(stage: int, mb: Microbatch, y: Tensor) -> Tensor:
    return y


def hand_made(mesh: Mesh, table: Table, acts: Callable[[int, Microbatch, Tensor], Tensor] = unchanged,
              progress: Progress | None = None) -> Executor:  # fmt: skip
    """This rank's stages of :class:`Part` under ``table``."""
    run, owner = Run(mesh, progress=progress or Progress()), owners(table)
    mine = [s for s, rank in enumerate(owner) if rank == mesh.pp.rank]
    parts: Mapping[str, nn.Module] = {f"part.{s}": Part(run, s, len(owner), acts) for s in mine}
    entries, double = collect(parts, run), torch.float64
    precision = Precision(master=double, compute=double, reduce=double)
    stages: dict[int, Stage] = {}
    for s in mine:
        stages[s] = Stage({f"part.{s}": parts[f"part.{s}"]}, run, zero=1, precision=precision, entries=entries,
                          earlier=list(stages.values()))  # fmt: skip
    return Executor(table, stages, run)


@dataclass
class Memory:
    """What one rank held at most in a step."""

    peak: int
    """Activations, one for each microbatch in each stage."""
    left: int
    """Activations that outlive the step."""
    sent: int
    """Sent tensors that lived at once, the most of one kind to one rank."""
    received: int
    """Inputs of stages that lived at once, the most."""
    gradients: list[Tensor]


def memory(context: RankContext, layout: str, name: str, n: int) -> Memory:
    """Three steps under a named schedule, the last one watched."""
    mesh = context.mesh(layout)
    table = build(name, mesh.pp.size, n)
    living: defaultdict[object, weakref.WeakSet[Tensor]] = defaultdict(weakref.WeakSet)
    most: Counter[object] = Counter()

    class Watch(Progress):
        def at(self, text: str) -> None:
            for key, alive in living.items():
                most[key] = max(most[key], len(alive))

    executor = hand_made(mesh, table, progress=Watch())
    real_send, real_forward = pipeline.p2p.send, Stage.forward

    def send(x: Tensor, axis: Any, to: int, *, tag: int = 0) -> Any:
        living[to, tag].add(x)
        return real_send(x, axis, to, tag=tag)

    def forward(self: Stage, x: Tensor | None, mb: Any, **kw: Any) -> Tensor:
        if x is not None:
            living["inputs"].add(x)
        return real_forward(self, x, mb, **kw)

    for _ in range(2):
        executor.step(microbatches(n))
    assert len(Activation.living) == 0
    Activation.peak = 0
    with patch.object(pipeline.p2p, "send", send), patch.object(Stage, "forward", forward):
        executor.step(microbatches(n))
    gradients = [s.value.grad for stage in executor.stages.values() for s in stage.shards if s.value.grad is not None]
    received = most.pop("inputs", 0)
    left = len(Activation.living) + sum(map(len, living.values()))
    return Memory(Activation.peak, left, max(most.values()), received, gradients)


def run_parts(context: RankContext, layout: str, name: str, n: int) -> dict[int, Tensor]:
    """Gradients of this rank's hand-made stages, by stage."""
    mesh = context.mesh(layout)
    executor = hand_made(mesh, build(name, mesh.pp.size, n))
    executor.step(microbatches(n))
    return {s: shard.value.grad.view(3, 3).clone() for s, stage in executor.stages.items() for shard in stage.shards
            if shard.value.grad is not None}  # fmt: skip


def spans(context: RankContext, layout: str, name: str, n: int, sleep_s: float) -> tuple[int, list[Any]]:
    """This rank's spans of a step whose stages sleep."""
    recorder = FlightRecorder()
    mesh = context.mesh(layout, recorder)

    def sleep(stage: int, mb: Microbatch, y: Tensor) -> Tensor:
        time.sleep(sleep_s)
        return y

    executor = hand_made(mesh, build(name, mesh.pp.size, n), sleep)
    executor.step(microbatches(n))
    executor.step(microbatches(n))
    return mesh.pp.rank, [tuple(s) for s in recorder.step_spans()]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def changing(context: RankContext, layout: str, what: str) -> None:
    """A step in which stage 0 returns something else for a later microbatch, or what cannot travel."""

    def act(stage: int, mb: Microbatch, y: Tensor) -> Tensor:
        if stage or (mb.index < 2 and what in ("shape", "dtype")):
            return y
        return {"shape": y[:, :2], "dtype": y.float(), "complex": y.to(torch.complex128),
                "dims": y.view(*y.shape, *[1] * 7)}[what]  # fmt: skip

    mesh = context.mesh(layout)
    hand_made(mesh, build("1f1b", mesh.pp.size, 4), act).step(microbatches(4))


def of_other_sizes(context: RankContext, layout: str) -> list[Tensor]:
    """Microbatches of two sizes in one step, and of a third in the next: gradients of both."""
    mesh = context.mesh(layout)
    executor, found = hand_made(mesh, build("1f1b", mesh.pp.size, 4)), []
    mixed = [a if a.index % 2 else b for a, b in zip(microbatches(4), microbatches(4, 5), strict=True)]
    for given in (mixed, microbatches(4, 1)):
        executor.step(given)
        found += [s.value.grad.clone() for stage in executor.stages.values() for s in stage.shards
                  if s.value.grad is not None]  # fmt: skip
    return found


@dataclass
class Stuck:
    """How a rank's step ended whose neighbour did not come."""

    message: str
    waited_s: float
    at: str = ""
    """What the rank was at, last."""


@contextmanager
def timed(found: Stuck) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    except MessageError as error:
        found.message = str(error)
    found.waited_s = time.monotonic() - began


def absent(context: RankContext, layout: str, name: str, n: int, where: tuple[int, int], limit_s: float,
           sleep_s: float) -> Stuck:  # fmt: skip
    """A good step, then one in which a stage stops at a microbatch: asleep for ``sleep_s``, or for ever if 0."""
    mesh, stops, found = context.mesh(layout), [False], Stuck("", 0.0)

    class Watch(Progress):
        def at(self, text: str) -> None:
            found.at = text

    def act(stage: int, mb: Microbatch, y: Tensor) -> Tensor:
        if stops[0] and (stage, mb.index) == where:
            if not sleep_s:
                os._exit(7)
            time.sleep(sleep_s)
        return y

    executor = hand_made(mesh, build(name, mesh.pp.size, n), act, Watch())
    executor.step(microbatches(n))
    set_step_timeouts(mesh.groups, limit_s)
    stops[0] = True
    if not sleep_s:
        executor.step(microbatches(n))
    with timed(found):
        executor.step(microbatches(n))
    return found
