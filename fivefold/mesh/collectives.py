"""The collectives that layers call: differentiable, each naming its axis and states, gone at size 1.

Along one axis a tensor is in a state, and the state fixes its gradient's:

======  ===========================================  ========
state   meaning                                      gradient
======  ===========================================  ========
R       same value everywhere, used differently      P
I       same value everywhere, used identically      I
S(d)    rank i holds slice i of dim d                S(d)
P       the value is the sum of what ranks hold      R
======  ===========================================  ========

A collective is a linear map on the stacked local tensors, so its backward is the transpose of that map, and the states
say which transpose is meant. They are registered as torch operators with a shape rule each, so that ``torch.compile``
traces through them and ``meta`` tensors pass. An operator can carry only numbers and text, so an axis travels as a key
and is found again by it; a recorded run's scope travels as text too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..observe.recorder import Scope
from . import transport
from .axis import Axis, find
from .operators import backward_scope, differentiate, operator, parse_scope, scope_text

# ---- raw moves along any dim: the values of the operators below ------------------------------------------------------


def _gather(x: Tensor, axis: Axis, dim: int, scope: Scope | None, to: str) -> Tensor:
    return transport.all_gather(x.contiguous(), axis, dim=dim, states=f"S({dim})->{to}", scope=scope).wait()


def _sum_scatter(x: Tensor, axis: Axis, dim: int, scope: Scope | None) -> Tensor:
    return transport.reduce_scatter(x, axis, dim=dim, states=f"P->S({dim})", scope=scope).wait()


def _slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, axis: Axis, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= axis.size
    out = x.new_zeros(shape)
    out.narrow(dim, axis.rank * x.shape[dim], x.shape[dim]).copy_(x)
    return out


def _like(x: Tensor, dim: int, rows: int) -> Tensor:
    """What a shape rule returns: ``x`` with ``rows`` along ``dim``."""
    return x.new_empty(*x.shape[:dim], rows, *x.shape[dim + 1 :])


def _same(x: Tensor, *_: Any) -> Tensor:
    """The shape rule of operators that keep the shape. Results are contiguous, whatever ``x`` is."""
    return x.new_empty(x.shape)


# ---- the operators ---------------------------------------------------------------------------------------------------


def _transpose(name: str, backward: Callable[..., Tensor]) -> None:
    """Give the operator ``name`` its gradient.

    ``backward(gradient, *arguments)`` gets the forward's arguments without the tensor, the scope turned to backward.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.arguments = (*inputs[1:-1], backward_scope(inputs[-1]))

    def run(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (backward(gradient, *ctx.arguments), *(None for _ in ctx.arguments))

    differentiate(name, keep, run)


@operator("all_gather", shape=lambda x, axis, dim, to, scope: _like(x, dim, x.shape[dim] * find(axis).size))
def _all_gather(x: Tensor, axis: str, dim: int, to: str, scope: str) -> Tensor:
    return _gather(x, find(axis), dim, parse_scope(scope), to)


@operator("reduce_scatter", shape=lambda x, axis, dim, scope: _like(x, dim, x.shape[dim] // find(axis).size))
def _reduce_scatter(x: Tensor, axis: str, dim: int, scope: str) -> Tensor:
    return _sum_scatter(x, find(axis), dim, parse_scope(scope))


@operator("all_reduce", shape=_same)
def _all_reduce(x: Tensor, axis: str, to: str, scope: str) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    return transport.all_reduce(x, find(axis), states=f"P->{to}", scope=parse_scope(scope)).wait()


@operator("replicate", shape=_same)
def _replicate(x: Tensor, axis: str, scope: str) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@operator("shard", shape=lambda x, axis, dim, of, scope: _like(x, dim, x.shape[dim] // find(axis).size))
def _shard(x: Tensor, axis: str, dim: int, of: str, scope: str) -> Tensor:
    return _slice(x, find(axis), dim)


@operator("unshard", shape=lambda x, axis, dim, scope: _like(x, dim, x.shape[dim] * find(axis).size))
def _unshard(x: Tensor, axis: str, dim: int, scope: str) -> Tensor:
    return _pad(x, find(axis), dim)


@operator("all_to_all", shape=lambda x, axis, send, receive, scope: _like(x, 0, sum(receive)))
def _all_to_all(x: Tensor, axis: str, send: Sequence[int], receive: Sequence[int], scope: str) -> Tensor:
    return transport.all_to_all(x.contiguous(), find(axis), send, receive, scope=parse_scope(scope)).wait()


@operator("reshard", shape=lambda x, axis, split, join, scope: _resharded(x, find(axis).size, split, join))
def _reshard(x: Tensor, axis: str, split: int, join: int, scope: str) -> Tensor:
    a, states = find(axis), f"S({join})->S({split})"
    parts = transport.to_front(x, a.size, split)
    counts = [x.shape[0] if split else x.shape[0] // a.size] * a.size
    received = transport.all_to_all(parts, a, counts, counts, states=states, op="reshard", scope=parse_scope(scope))
    return transport.from_front(received.wait().unflatten(0, (a.size, -1)), join)


def _resharded(x: Tensor, n: int, split: int, join: int) -> Tensor:
    shape = list(x.shape)
    shape[split] //= n
    shape[join] *= n
    return x.new_empty(shape)


@operator("all_gather_uneven", shape=lambda x, axis, counts, scope: _like(x, 0, sum(counts)))
def _all_gather_uneven(x: Tensor, axis: str, counts: Sequence[int], scope: str) -> Tensor:
    a = find(axis)
    copies = x.expand(a.size, *x.shape).reshape(a.size * x.shape[0], *x.shape[1:]).contiguous()
    return transport.all_to_all(copies, a, [x.shape[0]] * a.size, counts, states="S(0)->R", op="all_gather_uneven",
                                scope=parse_scope(scope)).wait()  # fmt: skip


@operator("reduce_scatter_uneven", shape=lambda x, axis, counts, scope: _like(x, 0, counts[find(axis).rank]))
def _reduce_scatter_uneven(x: Tensor, axis: str, counts: Sequence[int], scope: str) -> Tensor:
    a = find(axis)
    mine = counts[a.rank]
    parts = transport.all_to_all(x.contiguous(), a, counts, [mine] * a.size, states="P->S(0)",
                                 op="reduce_scatter_uneven", scope=parse_scope(scope)).wait()  # fmt: skip
    return transport.sum_parts(parts, a.size)


@operator("broadcast", shape=_same)
def _broadcast(x: Tensor, axis: str, root: int, to: str, scope: str) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    return transport.broadcast(x, find(axis), root, states=f"->{to}", scope=parse_scope(scope)).wait()


@operator("collect", shape=_same)
def _collect(x: Tensor, axis: str, root: int, of: str, scope: str) -> Tensor:
    """What a broadcast's gradient is: the sum (of P) or the value (of I) on the root, zeros elsewhere."""
    a = find(axis)
    x = x.clone(memory_format=torch.contiguous_format)
    total = transport.all_reduce(x, a, states="P->root", scope=parse_scope(scope)).wait() if of == "P" else x
    return total if a.rank == root else total.zero_()


@operator("shift", shape=_same)
def _shift(x: Tensor, axis: str, by: int, scope: str) -> Tensor:
    return transport.shift(x.contiguous(), find(axis), by, scope=parse_scope(scope)).wait()


@operator("reduce_values", shape=_same)
def _reduce_values(x: Tensor, axis: str, op: str, scope: str) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    states = "P->I" if op == "sum" else f"{op}->I"
    return transport.all_reduce(x, find(axis), op, states=states, scope=parse_scope(scope)).wait()


# ---- their gradients -------------------------------------------------------------------------------------------------


def _gather_back(g: Tensor, axis: str, dim: int, to: str, scope: str) -> Tensor:
    return _reduce_scatter(g, axis, dim, scope) if to == "R" else _shard(g, axis, dim, "I", scope)


def _shard_back(g: Tensor, axis: str, dim: int, of: str, scope: str) -> Tensor:
    return _all_gather(g, axis, dim, "I", scope) if of == "I" else _unshard(g, axis, dim, scope)


_transpose("all_gather", _gather_back)
_transpose("reduce_scatter", lambda g, axis, dim, scope: _all_gather(g, axis, dim, "R", scope))
_transpose("all_reduce", lambda g, axis, to, scope: _all_reduce(g, axis, "R", scope) if to == "R" else g)
_transpose("replicate", lambda g, axis, scope: _all_reduce(g, axis, "I", scope))
_transpose("shard", _shard_back)
_transpose("reshard", lambda g, axis, split, join, scope: _reshard(g, axis, join, split, scope))
_transpose("unshard", lambda g, axis, dim, scope: _shard(g, axis, dim, "R", scope))
_transpose("all_to_all", lambda g, axis, send, receive, scope: _all_to_all(g, axis, receive, send, scope))
_transpose("all_gather_uneven", lambda g, axis, counts, scope: _reduce_scatter_uneven(g, axis, counts, scope))
_transpose("reduce_scatter_uneven", lambda g, axis, counts, scope: _all_gather_uneven(g, axis, counts, scope))
_transpose("broadcast", lambda g, axis, root, to, scope: _collect(g, axis, root, "P" if to == "R" else "I", scope))
_transpose("shift", lambda g, axis, by, scope: _shift(g, axis, -by, scope))


# ---- what layers call ------------------------------------------------------------------------------------------------


def all_gather(x: Tensor, axis: Axis, dim: int, to: Literal["R", "I"] = "R") -> Tensor:
    """S(dim) -> R, gradient P -> S(dim) by reduce-scatter; or -> I, whose gradient is I and only needs slicing."""
    return x if axis.size == 1 else _all_gather(x, axis.key, _dim(x, dim), to, scope_text(axis))


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """P -> S(dim), gradient S(dim) -> R by all-gather. ``dim`` must divide."""
    if axis.size == 1:
        return x
    _divides(x, axis, dim, "reduce_scatter")
    return _reduce_scatter(x, axis.key, _dim(x, dim), scope_text(axis))


def all_reduce(x: Tensor, axis: Axis, to: Literal["R", "I"] = "I") -> Tensor:
    """P -> I, whose gradient passes as it is; or P -> R, whose gradient is all-reduced too."""
    return x if axis.size == 1 else _all_reduce(x, axis.key, to, scope_text(axis))


def replicate(x: Tensor, axis: Axis) -> Tensor:
    """I -> R: from here on each rank uses ``x`` its own way, so the gradients are summed. Moves nothing forward."""
    return x if axis.size == 1 else _replicate(x, axis.key, scope_text(axis))


def shard(x: Tensor, axis: Axis, dim: int, of: Literal["R", "I"] = "I") -> Tensor:
    """This rank's slice. I -> S(dim): gradients are gathered. R -> S(dim): each gradient is its part amid zeros."""
    if axis.size == 1:
        return x
    _divides(x, axis, dim, "shard")
    return _shard(x, axis.key, _dim(x, dim), of, scope_text(axis))


def all_to_all(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """S(0) -> S(0): ``send[i]`` rows go to rank i, ``receive[i]`` come from it. The gradient goes back the same way."""
    return x if axis.size == 1 else _all_to_all(x, axis.key, list(send), list(receive), scope_text(axis))


def reshard(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    """S(join) -> S(split): ``split`` is cut and ``join`` made whole by an all-to-all. The gradient goes back."""
    if axis.size == 1:
        return x
    split, join = _dim(x, split), _dim(x, join)
    _divides(x, axis, split, "reshard")
    return _reshard(x, axis.key, split, join, scope_text(axis))


def all_gather_uneven(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """S(0) -> R where rank i holds ``counts[i]`` rows; gradient P -> S(0)."""
    return x if axis.size == 1 else _all_gather_uneven(x, axis.key, list(counts), scope_text(axis))


def reduce_scatter_uneven(x: Tensor, axis: Axis, counts: Sequence[int]) -> Tensor:
    """P -> S(0) where rank i keeps ``counts[i]`` rows; gradient S(0) -> R."""
    return x if axis.size == 1 else _reduce_scatter_uneven(x, axis.key, list(counts), scope_text(axis))


def broadcast(x: Tensor, axis: Axis, root: int = 0, to: Literal["R", "I"] = "R") -> Tensor:
    """Place ``root``'s value -> R, gradients summed to the root; or -> I, the root keeps its own. Others get zeros."""
    return x if axis.size == 1 else _broadcast(x, axis.key, root, to, scope_text(axis))


def shift(x: Tensor, axis: Axis, by: int = 1) -> Tensor:
    """S -> S: ``x`` goes ``by`` places on around the ring, the gradient goes back."""
    return x if axis.size == 1 else _shift(x, axis.key, by, scope_text(axis))


def sum_values(x: Tensor, axis: Axis) -> Tensor:
    """P -> I without gradient: counts, statistics."""
    return x if axis.size == 1 else _reduce_values(x.detach(), axis.key, "sum", scope_text(axis))


def max_values(x: Tensor, axis: Axis) -> Tensor:
    """The largest value over the axis, without gradient."""
    return x if axis.size == 1 else _reduce_values(x.detach(), axis.key, "max", scope_text(axis))


def gather_values(x: Tensor, axis: Axis) -> Tensor:
    """``[...]`` -> ``[n, ...]``, without gradient."""
    return x[None] if axis.size == 1 else _all_gather(x.detach()[None], axis.key, 0, "I", scope_text(axis))


def swap_values(x: Tensor, axis: Axis) -> Tensor:
    """``[n, ...]`` -> ``[n, ...]``: row i goes to rank i, row i of the result came from rank i; without gradient."""
    ones = [1] * axis.size
    return x if axis.size == 1 else _all_to_all(x.detach(), axis.key, ones, ones, scope_text(axis))


def _dim(x: Tensor, dim: int) -> int:
    """``dim`` counted from the front."""
    return dim if dim >= 0 else dim + x.ndim


def _divides(x: Tensor, axis: Axis, dim: int, op: str) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"{op} over {axis.name}={axis.size} cannot cut dim {dim} of {tuple(x.shape)}. "
            f"Use a size that {axis.size} divides, or the uneven form."
        )
