"""What the tests of the mesh run on each rank of a pool."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.config.dims import ParallelDims
from fivefold.mesh import collectives as c
from fivefold.mesh import p2p
from fivefold.mesh.axis import Axis
from fivefold.mesh.mesh import Groups
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.text import gather_text
from fivefold.observe.recorder import FlightRecorder, Recorder

from .operations import operations


@dataclass
class Seen:
    """What one rank saw of an operation."""

    value: Tensor
    gradient: Tensor
    events: list[dict[str, Any]]


def operation(context: RankContext, name: str, layout: str, axis_name: str, strided: bool = False) -> Seen:
    """Run one operation forward and backward over an axis, recorded, the forward in a scope of its own."""
    recorder = FlightRecorder()
    axis: Axis = getattr(context.mesh(layout, recorder), axis_name)
    op = operations(axis.size)[name]
    x = op.inputs()[axis.rank]
    if strided:  # the same values, with gaps between them
        x = torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    x.requires_grad_()
    with recorder.at(module="blocks.1", phase="forward", microbatch=3):
        y = op.call(x, axis)
    outputs, _ = op.expected()
    y.backward(op.cotangents(outputs)[axis.rank])
    assert x.grad is not None
    return Seen(y, x.grad, [asdict(e) for e in recorder.events])


def values(context: RankContext) -> dict[str, Any]:
    """The exchanges without gradient."""
    tp = context.mesh(f"tp{context.world}").tp
    x = torch.arange(3) + 10 * tp.rank
    y = torch.tensor([1.0, -1.0], requires_grad=True)
    many = torch.arange(tp.size * 2).view(tp.size, 2) + 100 * tp.rank
    results = {"sum": c.sum_values(x, tp), "max": c.max_values(x, tp), "gather": c.gather_values(x, tp),
               "swap": c.swap_values(many, tp)}  # fmt: skip
    grads = [f(y, tp).requires_grad for f in (c.sum_values, c.max_values, c.gather_values)]
    grads.append(c.swap_values(y.expand(tp.size, 2), tp).requires_grad)
    return {**results, "grads": grads, "x": x}


class Silent(Recorder):
    """A recorder that is off, and fails when it is asked to record."""

    def post(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a recorder that is off was called")


def off(context: RankContext) -> None:
    """Every operation with a recorder that is off."""
    tp = context.mesh(f"tp{context.world}", Silent()).tp
    for op in operations(tp.size).values():
        y = op.call(op.inputs()[tp.rank].requires_grad_(), tp)
        y.sum().backward()


def all_in_one(axis: Axis) -> Callable[[Tensor], Tensor]:
    """A function through every collective that keeps its input's shape ``[2, 4n, 3]`` or can be undone."""
    n = axis.size

    def run(x: Tensor) -> Tensor:
        y = c.reduce_scatter(x.sin(), axis, 1)
        y = c.all_gather(y * 2, axis, 1)
        y = c.all_reduce(y.cos(), axis)
        y = c.replicate(y, axis)
        y = c.all_reduce(y * 0.5, axis, to="R")
        y = c.shard(y, axis, 1) + c.shard(y, axis, 1, of="R")
        y = c.all_gather(y.transpose(0, 2), axis, 1, to="I").transpose(0, 2)
        y = c.broadcast(y, axis, n - 1) + c.shift(y, axis)
        rows = c.all_to_all(y.reshape(2 * n, -1), axis, [2] * n, [2] * n)
        rows = c.all_gather_uneven(rows, axis, [2 * n] * n).sin()
        rows = c.reduce_scatter_uneven(rows, axis, [2 * n] * n)
        return rows.view_as(x) + c.max_values(y, axis) + c.sum_values(y, axis)

    return run


def ragged(axis: Axis) -> Callable[[Tensor], Tensor]:
    """A function of ``[2, 4n, 3]`` whose result has another shape on each rank, though the call is the same."""
    counts = [8 * axis.size - axis.size + 1] + [1] * (axis.size - 1)
    return lambda x: c.reduce_scatter_uneven(c.broadcast(x.sin(), axis, 1).flatten(0, 1), axis, counts).cos()


def compiled(context: RankContext, which: str, backend: str, folder: str | None = None) -> list[tuple[Tensor, Tensor]]:
    """Value and gradient of a function, eager and compiled to one graph. Inductor keeps its graphs in ``folder``."""
    if folder is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    axis = context.mesh(f"tp{context.world}").tp
    fn = {"all_in_one": all_in_one, "ragged": ragged}[which](axis)
    results = []
    for f in (fn, torch.compile(fn, fullgraph=True, backend=backend)):
        generator = torch.Generator().manual_seed(axis.rank)
        x = torch.randn(2, 4 * axis.size, 3, dtype=torch.float64, generator=generator).requires_grad_()
        y = f(x)
        y.square().sum().backward()
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    return results


def checked(context: RankContext) -> None:
    """torch's own check of the operators: schema, shape rule, gradient and tracing agree with what they do."""
    axis = context.mesh(f"tp{context.world}").tp
    ops, n = torch.ops.fivefold, axis.size
    x = torch.ones(2 * n, 3 * n).t().requires_grad_()  # not contiguous
    for op, arguments in {
        ops.all_gather: (0, "R"), ops.reduce_scatter: (1,), ops.all_reduce: ("R",), ops.replicate: (),
        ops.shard: (0, "I"), ops.unshard: (1,), ops.all_to_all: ([3] * n, [3] * n), ops.broadcast: (0, "I"),
        ops.all_gather_uneven: ([3 * n] * n,), ops.reduce_scatter_uneven: ([3] * n,), ops.shift: (1,),
    }.items():  # fmt: skip
        torch.library.opcheck(op.default, (x, axis.key, *arguments, ""))


def groups(context: RankContext, layouts: list[str]) -> list[tuple[int, float]]:
    """After each layout's mesh: threads of this process, and the sum of ranks over the mesh's last axis."""
    seen = []
    for layout in layouts:
        axis = context.mesh(layout).join("pp", "ddp", "fsdp", "cp", "tp")
        total = c.sum_values(torch.tensor(float(context.rank)), axis)
        seen.append((len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else 0, total.item()))
    return seen


def axis_sums(
    context: RankContext, layout: str, ends: tuple[int, int] | None = None
) -> dict[str, tuple[tuple[int, ...], float]]:
    """For every axis and join of a layout: its ranks as planned, and the sum of world ranks that really met."""
    mesh = context.mesh(layout, ends=ends)
    rank = torch.tensor(float(context.rank))
    return {"+".join(names): (axis.ranks, c.sum_values(rank, axis).item()) for names, axis in mesh._axes.items()}


def groups_of(context: RankContext, layout: str) -> tuple[int, int]:
    """How many groups a mesh has, and how many its layout and a recorded one share."""
    mesh = context.mesh(layout)
    again = context.mesh(layout, FlightRecorder())
    return len(mesh.groups), len({id(g) for g in mesh.groups} & {id(g) for g in again.groups})


def groups_by_use(context: RankContext) -> tuple[bool, bool, list[float]]:
    """Whether ranks and use name one group, whether another use names another, and sums over the two."""
    groups, ranks = Groups(context.rank), tuple(range(context.world))
    for use in ("", "back", "", "back"):
        groups.create(ranks, use)
    both = [groups.get(ranks), groups.get(ranks, "back")]
    sums = [torch.full((1,), float(i + context.rank)) for i in range(2)]
    for group, x in zip(both, sums, strict=True):
        dist.all_reduce(x, group=group)
    return groups.get(ranks) is both[0], both[0] is not both[1], [x.item() for x in sums]


def parsed(context: RankContext, dims: ParallelDims) -> bool:
    """Whether a layout and its string give the same mesh."""
    return context.mesh(dims) is context.mesh(str(dims))


# ---- messages --------------------------------------------------------------------------------------------------------


def passed_on(context: RankContext, n: int) -> tuple[list[list[float]], list[dict[str, Any]], list[bool]]:
    """Every rank sends ``n`` messages of growing size to the next; what came, the events, and whether handles let go.

    All are posted before the first wait.
    """
    recorder = FlightRecorder()
    pp = context.mesh(f"pp{context.world}", recorder).pp
    to, source = (pp.rank + 1) % pp.size, (pp.rank - 1) % pp.size
    sends, receives = [], []
    with recorder.at(stage=2, microbatch=5):
        for i in range(n):
            sends.append(p2p.send(torch.full((i + 1,), 10.0 * pp.rank + i), pp, to))
            receives.append(p2p.receive(torch.empty(i + 1), pp, source))
    came = [handle.wait().tolist() for handle in receives]
    for handle in sends:
        assert len(handle.keep) == 1
        handle.wait()
    events = [asdict(e) for e in recorder.events]
    return came, events, [handle.keep == () for handle in [*sends, *receives]]


def two_channels(context: RankContext) -> tuple[list[float], list[float]]:
    """Rank 0 sends activations 1, 2, 3 and gradients 10, 20; rank 1 waits for the gradients first."""
    mesh = context.mesh("pp2")
    forward, back = mesh.pp, mesh.pp_back
    if forward.rank == 0:
        handles = [p2p.send(torch.tensor([x]), forward, 1) for x in (1.0, 2.0, 3.0)]
        handles += [p2p.send(torch.tensor([x]), back, 1, tag=1) for x in (10.0, 20.0)]
        for handle in reversed(handles):
            handle.wait()
        return [], []
    activations = [p2p.receive(torch.empty(1), forward, 0) for _ in range(3)]
    gradients = [p2p.receive(torch.empty(1), back, 0, tag=1) for _ in range(2)]
    return [h.wait().item() for h in gradients], [h.wait().item() for h in activations]


def texts(context: RankContext, own: list[str]) -> list[str]:
    """Every rank's text, on every rank."""
    return gather_text(own[context.rank], context.mesh(f"pp{context.world}").pp, torch.device("cpu"))


# ---- for the pool itself ---------------------------------------------------------------------------------------------


def who(context: RankContext, *values: Any) -> tuple[int, int, int, Any]:
    """Rank, world, threads and what was sent."""
    return context.rank, os.getpid(), torch.get_num_threads(), values


def square(context: RankContext, n: int) -> float:
    """A matrix product and its gradient, large enough for OpenMP to start threads."""
    a = torch.ones(n, n, requires_grad=True)
    (a @ a).sum().backward()
    assert a.grad is not None
    return c.sum_values(a.grad[0, 0].detach(), context.mesh(f"tp{context.world}").tp).item()


def fail_on(context: RankContext, rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    if context.rank == rank:
        raise ArithmeticError("one rank is wrong")
    dist.barrier()


def stay_away(context: RankContext, rank: int) -> None:
    """One rank never comes to the barrier."""
    if context.rank == rank:
        time.sleep(60)
    dist.barrier()


def crash_on(context: RankContext, rank: int) -> None:
    """Kill one rank's process while the others wait for it."""
    if context.rank == rank:
        os.kill(os.getpid(), 9)
    dist.barrier()


def leave_on(context: RankContext, rank: int) -> None:
    """Exit on one rank."""
    if context.rank == rank:
        raise SystemExit(3)


def storage(context: RankContext) -> list[Tensor]:
    """Small views of a large storage."""
    return list(torch.arange(1_000_000.0)[:10].unbind())


def forever(context: RankContext) -> None:
    """Never come back."""
    threading.Event().wait()
