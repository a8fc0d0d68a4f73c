"""Attention over blocks of keys as they come from other ranks, and its backward, each one torch operator.

Backward is written out, because autograd would keep every block that passed, and could not send gradients while it
computes others. It takes the blocks a second time, and finds each one's gradient from the result, its gradient and the
lse over all keys (:mod:`fivefold.ops.partial`). Sums over blocks and over ranks are float32 at least.

Letters: B sequences, T tokens of a sequence on this rank, H query heads, E query width, V value width, P entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mesh.axis import Axis, find
from ...mesh.operators import backward_scope, differentiate, operator, scope_text
from ...ops.blocks import Keys, Pairs, Places, attend_, attend_backward_
from ...ops.partial import wide
from ..microbatch import MicroBatch
from .base import Heads, Latent, expand
from .exchange import Block, exchange
from .work import by_place, prepared


def attend(q: Tensor, kv: Heads | Latent, mb: MicroBatch, scale: float, axis: Axis, how: str, *,
           whole: bool = False) -> Tensor:  # fmt: skip
    """Causal attention inside each document ``[B, T, H, V]``, of queries ``[B, T, H, E]`` here with keys everywhere.

    Args:
        kv: what is exchanged: keys and values, or what each rank expands them from.
        how: name of the exchange, where ``axis`` has several ranks.
        whole: whether these are whole rows of a microbatch whose rows several ranks hold.
    """
    table, at = prepared(mb, axis.rank, whole=whole)
    if isinstance(kv, Latent):
        first, second, weight, widths = kv.latent, kv.key, kv.weight, [kv.nope_dim, kv.v_dim]
    else:
        first, second, weight, widths = kv.k, kv.v, None, []
    out, _ = _attend(q, first, second, weight, widths, table, at, how, axis.key, scale, scope_text(axis))
    return out


# ---- blocks of keys and values ---------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """Of a block that has come, what this rank's queries see."""

    block: Block
    """As it was sent, cut to the tokens ``[start, stop)``."""
    start: int
    stop: int
    keys: Keys


def _seen(block: Block, weight: Tensor | None, widths: Sequence[int], pairs: Sequence[Pairs], at: Tensor, rank: int,
          place: int) -> _Seen:  # fmt: skip
    """Keys and values of those tokens of the block from ``place`` that some pair has, expanded if there is a weight."""
    start, stop = min(p.k_start for p in pairs), max(p.k_stop for p in pairs)
    first, second = (x[:, start:stop] for x in block)
    k, v = (first, second) if weight is None else expand(first @ weight.t(), second, *widths)
    places = Places(at[rank], at[place, :, :, start:stop]) if at.numel() else Places(at, at)
    return _Seen((first, second), start, stop, Keys(k, v, [p.moved(start) for p in pairs], places))


def _collapsed(dk: Tensor, dv: Tensor, weight: Tensor, widths: Sequence[int], latent: Tensor, dweight: Tensor) -> Block:
    """The gradients of latent and shared key from those of the keys and values expanded from them.

    Adds the weight's to ``dweight``.
    """
    dkv = torch.cat([dk[..., : widths[0]], dv], -1).flatten(2).to(latent.dtype)
    dweight += dkv.flatten(0, 1).t() @ latent.flatten(0, 1)
    return (dkv @ weight).to(dk.dtype), dk[..., widths[0] :].sum(2)


# ---- the operators ---------------------------------------------------------------------------------------------------


def _shapes(q: Tensor, first: Tensor, second: Tensor, weight: Tensor | None, widths: Sequence[int], *rest: Any
            ) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, tokens, heads, _ = q.shape
    out = q.new_empty(rows, tokens, heads, widths[1] if widths else second.shape[-1])
    return out, q.new_empty(rows, heads, tokens, dtype=wide(q.dtype))


@operator("attend", shape=_shapes)
def _attend(q: Tensor, first: Tensor, second: Tensor, weight: torch.Tensor | None, widths: Sequence[int], table: Tensor,
            at: Tensor, how: str, axis: str, scale: float, scope: str) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the result and its lse ``[B, H, T]``."""
    like, lse = _shapes(q, first, second, weight, widths)
    cp = find(axis)
    pairs = by_place(table, cp.size)
    # a sum of several blocks is rounded once
    out = torch.empty_like(like, dtype=wide(q.dtype) if cp.size > 1 else q.dtype)
    for place, block in exchange(how, cp, scope).blocks((first, second)):
        if pairs[place]:
            seen = _seen(block, weight, widths, pairs[place], at, cp.rank, place)
            attend_(out, lse, q, seen.keys, scale=scale, first=place == cp.rank)
    return out.to(q.dtype), lse


def _gradient_shapes(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, first: Tensor, second: Tensor,
                     weight: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Contiguous, whatever the inputs are."""
    dweight = q.new_empty(0 if weight is None else weight.shape)
    return q.new_empty(q.shape), first.new_empty(first.shape), second.new_empty(second.shape), dweight


@operator("attend_backward", shape=_gradient_shapes)
def _attend_backward(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, first: Tensor, second: Tensor,
                     weight: torch.Tensor | None, widths: Sequence[int], table: Tensor, at: Tensor, how: str, axis: str,
                     scale: float, scope: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, of the two tensors of this rank's block, and of the weight (empty without one)."""
    cp, dtype = find(axis), wide(q.dtype)
    pairs, ranks = by_place(table, cp.size), exchange(how, cp, scope)
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dweight = torch.zeros(weight.shape if weight is not None else 0, dtype=dtype, device=q.device)
    for place, block in ranks.blocks((first, second)):
        if not pairs[place]:
            ranks.give(place, _zeros((first, second), dtype))
            continue
        seen, own = _seen(block, weight, widths, pairs[place], at, cp.rank, place), place == cp.rank
        make = torch.empty if own else torch.zeros
        dk, dv = (make(x.shape, dtype=dtype, device=q.device) for x in seen.keys[:2])
        attend_backward_((dq, dk, dv), grad, out, lse, q, seen.keys, scale=scale, first=own)
        gradient = (dk, dv) if weight is None else _collapsed(dk, dv, weight, widths, seen.block[0], dweight)
        ranks.give(place, _whole(gradient, (first, second), seen.start, seen.stop))
        del block, seen, dk, dv, gradient  # they would live on while the next block is at work
    dfirst, dsecond = ranks.returned()
    return dq.to(q.dtype), dfirst.to(first.dtype), dsecond.to(second.dtype), dweight.to(q.dtype)


def _zeros(like: Block, dtype: torch.dtype) -> Block:
    return torch.zeros_like(like[0], dtype=dtype), torch.zeros_like(like[1], dtype=dtype)


def _whole(gradient: Block, like: Block, start: int, stop: int) -> Block:
    """The gradient of the whole block from that of its tokens ``[start, stop)``."""
    if stop - start == like[0].shape[1]:
        return gradient
    whole = _zeros(like, gradient[0].dtype)
    for x, part in zip(whole, gradient, strict=True):
        x[:, start:stop] = part
    return whole


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, first, second, weight, widths, table, at, how, axis, scale, scope = inputs
    ctx.save_for_backward(*output, q, first, second, weight, table, at)
    ctx.arguments = widths, how, axis, scale, backward_scope(scope)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, q, first, second, weight, table, at = ctx.saved_tensors
    widths, *rest = ctx.arguments
    *gradients, dweight = _attend_backward(grad, out, lse, q, first, second, weight, widths, table, at, *rest)
    return (*gradients, None if weight is None else dweight, *(None for _ in range(7)))


differentiate("attend", _keep, _backward)
