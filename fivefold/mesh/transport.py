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
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..observe.recorder import Event, Scope
from . import gloo
from .axis import Axis

_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# torch 2.13 renamed both; 2.11 knows only the older names.


class Work(Protocol):
    """What torch gives back for a call under way."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


@dataclass
class Handle:
    """A call under way. ``wait`` returns its result, once it may be used by what the current stream runs next."""

    works: Sequence[Work]
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
        for work in self.works:
            work.wait()
        out = self.result()
        if self.event is not None:
            self.event.finish()
        self.works, self.keep = (), ()
        return out

    def done(self) -> bool:
        """Whether a ``wait`` would return at once, as far as the transport knows; gloo does not know of messages."""
        return all(work.is_completed() for work in self.works)


def _started(work: dist.Work | None) -> list[dist.Work]:
    """A call's work; torch gives none to a rank outside the group, which does not happen here."""
    assert work is not None
    return [work]


def to_front(x: Tensor, n: int, dim: int) -> Tensor:
    """``[..., n*s, ...]`` -> ``n`` parts ``[..., s, ...]`` one after the other along dim 0; copies only if it must."""
    parts = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return parts.movedim(dim, 0).contiguous().flatten(0, 1)


def from_front(parts: Tensor, dim: int) -> Tensor:
    """``[n, ..., s, ...]`` -> ``[..., n*s, ...]``; copies only if it must."""
    shape = list(parts.shape[1:])
    shape[dim] *= parts.shape[0]
    return parts.movedim(0, dim).reshape(shape)


def report(op: str, axis: Axis, states: str, x: Tensor, sent: float, received: float, scope: Scope | None,
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


def all_gather(shard: Tensor, axis: Axis, out: Tensor | None = None, *, dim: int = 0, states: str = "S(0)->R",
               scope: Scope | None = None) -> Handle:  # fmt: skip
    """Start gathering equal contiguous shards ``[.., s, ..]``; the result is ``[.., n*s, ..]`` in rank order.

    Args:
        out: where the result goes, with ``dim`` 0; it may hold ``shard`` at its place already.
    """
    n, rest = axis.size, (axis.size - 1) * shard.numel()
    event = report("all_gather", axis, states, shard, rest, rest, scope)
    if axis.native:
        parts = shard.new_empty(n, *shard.shape) if out is None else out.view(n, *shard.shape)
        work = _gather_single(parts.view(-1), shard.view(-1), group=axis.group, async_op=True)
        return Handle(_started(work), lambda: from_front(parts, dim), (shard, parts), event)
    if out is None and math.prod(shard.shape[:dim]) > 1:  # the parts do not lie one after the other
        pieces = [shard if i == axis.rank else torch.empty_like(shard) for i in range(n)]
        return Handle(gloo.gather(pieces, axis), lambda: torch.cat(pieces, dim), event=event)
    whole = shard.new_empty(*shard.shape[:dim], n * shard.shape[dim], *shard.shape[dim + 1 :]) if out is None else out
    pieces = whole.view(n, -1).unbind(0)
    if pieces[axis.rank].data_ptr() != shard.data_ptr():
        pieces[axis.rank].copy_(shard.view(-1))
    return Handle(gloo.gather(pieces, axis), lambda: whole, event=event)


def reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None, *, dim: int = 0, states: str = "P->S(0)",
                   scope: Scope | None = None) -> Handle:  # fmt: skip
    """Start summing ``x`` ``[.., n*s, ..]`` over the axis; the result is this rank's ``[.., s, ..]``, in rank order.

    Args:
        out: where the result goes.
    """
    n = axis.size
    rest = x.numel() // n * (n - 1)
    event = report("reduce_scatter", axis, states, x, rest, rest, scope)
    if out is None:
        out = x.new_empty(*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    if axis.native:
        parts = to_front(x, n, dim)
        work = _scatter_single(out.view(-1), parts.view(-1), group=axis.group, async_op=True)
        return Handle(_started(work), lambda: out, (parts, out), event)
    if n == 2:
        pieces = x.chunk(2, dim)
        sent = pieces[1 - axis.rank].contiguous()
        return Handle([gloo.exchange(sent, out, axis)], lambda: out.add_(pieces[axis.rank]), (sent,), event)
    parts = to_front(x, n, dim)
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=axis.group, async_op=True)
    return Handle(_started(work), lambda: sum_parts(received, n, out), (parts,), event)


def sum_parts(parts: Tensor, n: int, out: Tensor | None = None) -> Tensor:
    """Sum of ``n`` equal parts along dim 0, always in rank order; low precision adds up in fp32."""
    parts = parts.view(n, parts.shape[0] // n, *parts.shape[1:])
    if parts.dtype in (torch.bfloat16, torch.float16):
        total = parts.sum(0, dtype=torch.float32).to(parts.dtype)
        return total if out is None else out.copy_(total)
    return torch.sum(parts, 0, out=out)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum", *, states: str = "P->I", scope: Scope | None = None) -> Handle:
    """Start reducing ``x`` in place over the axis; ``op`` is ``sum``, ``max`` or ``min``."""
    n = axis.size
    moved = 2 * (n - 1) * x.numel() / n
    event = report("all_reduce", axis, states, x, moved, moved, scope)
    if not axis.native and x.numel() * x.element_size() <= gloo.SMALL_BYTES:
        work, result = gloo.small_all_reduce(x, axis, op)
        return Handle([work], result, event=event)
    kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    work = dist.all_reduce(x, kind, group=axis.group, async_op=True)
    return Handle(_started(work), lambda: x, (x,), event)


def all_to_all(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], *, states: str = "S(0)->S(0)",
               op: str = "all_to_all", scope: Scope | None = None) -> Handle:  # fmt: skip
    """Start sending ``send[i]`` rows to rank i; ``receive[i]`` rows arrive from rank i, in rank order."""
    row = math.prod(x.shape[1:])
    out = x.new_empty(sum(receive), *x.shape[1:])
    sent, received = (sum(c) - c[axis.rank] for c in (send, receive))
    event = report(op, axis, states, x, sent * row, received * row, scope)
    work = dist.all_to_all_single(out, x, list(receive), list(send), group=axis.group, async_op=True)
    return Handle(_started(work), lambda: out, (x, out), event)


def broadcast(x: Tensor, axis: Axis, root: int, *, states: str = "R", scope: Scope | None = None) -> Handle:
    """Start filling ``x`` in place with place ``root``'s values."""
    n = x.numel()
    mine = axis.rank == root
    event = report("broadcast", axis, states, x, (axis.size - 1) * n * mine, n * (not mine), scope)
    work = dist.broadcast(x, axis.ranks[root], group=axis.group, async_op=True)
    return Handle(_started(work), lambda: x, (x,), event)


def shift(x: Tensor, axis: Axis, by: int = 1, *, states: str = "S->S", scope: Scope | None = None) -> Handle:
    """Start passing ``x`` to the rank ``by`` places on around the ring; what arrives has the same shape."""
    if by % axis.size == 0:
        return Handle((), x.clone)
    out = torch.empty_like(x)
    event = report("shift", axis, states, x, x.numel(), x.numel(), scope)
    to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    if not axis.native:
        return Handle([gloo.move(x, out, axis, to, source)], lambda: out, event=event)
    ops = [dist.P2POp(dist.isend, x, axis.ranks[to], axis.group),
           dist.P2POp(dist.irecv, out, axis.ranks[source], axis.group)]  # fmt: skip
    return Handle(dist.batch_isend_irecv(ops), lambda: out, (x, out), event)
