"""How bytes cross ranks: the one place that calls ``torch.distributed``'s collectives, and reports every call.

The functions here move raw tensors, know no gradient, and work along dim 0. What is written on top of them:
:mod:`.collectives` (differentiable, any dim, traced by ``torch.compile``) for layers, and the data engine's and
executor's asynchronous calls, which get a :class:`Handle` back.

Bytes are the payload whatever the algorithm: an all-gather sends ``n-1`` shards, a reduce-scatter or all-to-all what
leaves the rank, an all-reduce ``2(n-1)/n`` of its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..observe.recorder import Event, Scope
from .axis import Axis

_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# torch 2.13 renamed both; 2.11 knows only the older names.


@dataclass
class Handle:
    """A collective under way. ``wait`` returns its result, once it may be used by what the current stream runs next."""

    work: dist.Work | None
    result: Callable[[], Tensor]
    keep: tuple[Tensor, ...] = ()
    """Buffers that must live until the transport is done with them."""
    event: Event | None = None

    def __post_init__(self) -> None:
        if self.event is not None:
            self.event.launched()

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.waiting()
        if self.work is not None:
            self.work.wait()
        out = self.result()
        if self.event is not None:
            self.event.finish()
        self.work, self.keep = None, ()
        return out


def native_reduce_scatter(axis: Axis) -> bool:
    """Whether the transport's own reduce-scatter is used: on NCCL yes; gloo's costs four times an all-to-all and a sum.

    Source: measured, 8 MB on 2 ranks: reduce_scatter_tensor 34 ms, all_to_all_single and a local sum 10 ms.
    """
    return axis.group is not None and dist.get_backend(axis.group) == "nccl"


def _post(op: str, axis: Axis, states: str, x: Tensor, sent: float, received: float, scope: Scope | None,
          shape: tuple[int, ...] | None = None) -> Event | None:  # fmt: skip
    """Report a call that moves ``sent`` and ``received`` elements."""
    if not axis.recorder.on:
        return None
    size, dtype = x.element_size(), str(x.dtype).removeprefix("torch.")
    event = axis.recorder.post(op, axis.name, axis.size, states, dtype, shape or tuple(x.shape), round(sent * size),
                               round(received * size), scope)  # fmt: skip
    if event is not None:
        event.start()
    return event


def all_gather(shard: Tensor, axis: Axis, out: Tensor | None = None, *, states: str = "S(0)->R",
               scope: Scope | None = None) -> Handle:  # fmt: skip
    """Start gathering equal shards ``[s, ...]`` into ``out`` ``[n*s, ...]`` in rank order."""
    n = axis.size
    if out is None:
        out = shard.new_empty(n * shard.shape[0], *shard.shape[1:])
    rest = (n - 1) * shard.numel()
    event = _post("all_gather", axis, states, shard, rest, rest, scope)
    work = _gather_single(out, shard, group=axis.group, async_op=True)
    return Handle(work, lambda: out, (shard, out), event)


def reduce_scatter(x: Tensor, axis: Axis, *, states: str = "P->S(0)", scope: Scope | None = None,
                   shape: tuple[int, ...] | None = None) -> Handle:  # fmt: skip
    """Start summing ``x`` ``[n*s, ...]`` over the axis; the result is this rank's ``[s, ...]``, summed in rank order.

    Args:
        shape: of the tensor as the caller's caller had it, where it differs from ``x``'s: for the record.
    """
    n = axis.size
    rest = x.numel() // n * (n - 1)
    event = _post("reduce_scatter", axis, states, x, rest, rest, scope, shape)
    if native_reduce_scatter(axis):
        out = x.new_empty(x.shape[0] // n, *x.shape[1:])
        work = _scatter_single(out, x, group=axis.group, async_op=True)
        return Handle(work, lambda: out, (x, out), event)
    parts = torch.empty_like(x)
    work = dist.all_to_all_single(parts, x, group=axis.group, async_op=True)
    return Handle(work, lambda: sum_parts(parts, n), (x, parts), event)


def sum_parts(parts: Tensor, n: int) -> Tensor:
    """Sum of ``n`` equal parts along dim 0, always in rank order; low precision adds up in fp32."""
    parts = parts.view(n, parts.shape[0] // n, *parts.shape[1:])
    if parts.dtype in (torch.bfloat16, torch.float16):
        return parts.sum(0, dtype=torch.float32).to(parts.dtype)
    return parts[0] + parts[1] if n == 2 else parts.sum(0)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum", *, states: str = "P->I", scope: Scope | None = None) -> Handle:
    """Start reducing ``x`` in place over the axis; ``op`` is ``sum``, ``max`` or ``min``."""
    n = axis.size
    moved = 2 * (n - 1) * x.numel() / n
    event = _post("all_reduce", axis, states, x, moved, moved, scope)
    kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    work = dist.all_reduce(x, kind, group=axis.group, async_op=True)
    return Handle(work, lambda: x, (x,), event)


def all_to_all(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], *, states: str = "S(0)->S(0)",
               op: str = "all_to_all", scope: Scope | None = None) -> Handle:  # fmt: skip
    """Start sending ``send[i]`` rows to rank i; ``receive[i]`` rows arrive from rank i, in rank order."""
    row = math.prod(x.shape[1:])
    out = x.new_empty(sum(receive), *x.shape[1:])
    sent, received = (sum(c) - c[axis.rank] for c in (send, receive))
    event = _post(op, axis, states, x, sent * row, received * row, scope)
    work = dist.all_to_all_single(out, x, list(receive), list(send), group=axis.group, async_op=True)
    return Handle(work, lambda: out, (x, out), event)


def broadcast(x: Tensor, axis: Axis, root: int, *, states: str = "R", scope: Scope | None = None) -> Handle:
    """Start filling ``x`` in place with place ``root``'s values."""
    n = x.numel()
    mine = axis.rank == root
    event = _post("broadcast", axis, states, x, (axis.size - 1) * n * mine, n * (not mine), scope)
    work = dist.broadcast(x, axis.ranks[root], group=axis.group, async_op=True)
    return Handle(work, lambda: x, (x,), event)


def wait_for_peer(work: dist.Work, axis: Axis) -> None:
    """Wait for a send or receive within the group's present time limit: gloo's own wait keeps the group's first one."""
    assert axis.group is not None
    if dist.get_backend(axis.group) == "gloo":
        work.wait(axis.group._get_backend(torch.device("cpu")).options._timeout)
    else:
        work.wait()


def shift(x: Tensor, axis: Axis, by: int = 1, *, states: str = "S->S", scope: Scope | None = None) -> Handle:
    """Start passing ``x`` to the rank ``by`` places on around the ring; what arrives has the same shape."""
    if by % axis.size == 0:
        return Handle(None, x.clone)
    out = torch.empty_like(x)
    event = _post("shift", axis, states, x, x.numel(), x.numel(), scope)
    to, source = axis.ranks[(axis.rank + by) % axis.size], axis.ranks[(axis.rank - by) % axis.size]
    ops = [dist.P2POp(dist.isend, x, to, axis.group), dist.P2POp(dist.irecv, out, source, axis.group)]
    works = dist.batch_isend_irecv(ops)

    def result() -> Tensor:
        for work in works:
            wait_for_peer(work, axis)
        return out

    return Handle(None, result, (x, out), event)
