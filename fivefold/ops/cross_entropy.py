"""Head and cross-entropy in one, over a vocabulary split by rows and a few tokens at a time.

The loss is the sum over tokens of ``log(sum_j exp(l_j)) - l_target`` with ``l = hidden @ weight.T``. Every rank holds
some rows of the weight; what crosses ranks is a maximum and two sums per token, through two callbacks. The gradients of
a chunk are computed as soon as its loss is, so that its logits can be dropped: logits of the whole batch never exist.

Letters: N tokens, n tokens of a chunk, D hidden width, V rows of the weight on this rank (v without its padding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.ops.linear import WeightGradQueue, require_leaf

IGNORE = -100  # the target of a token that has none; PyTorch's own default
Reduce = Callable[[Tensor], Tensor]


def local_max(logits: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
    """The largest logit of each token on this rank; -inf where the rank holds no row."""
    return logits.amax(1) if logits.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)


def local_rows(targets: Int64[Tensor, " n"], first_row: int, n_rows: int) -> tuple[Tensor, Tensor]:
    """Each target as a row of this rank (0 where it is another's), and whether it is this rank's."""
    rows = targets - first_row
    owned = (rows >= 0) & (rows < n_rows)
    return rows.where(owned, 0), owned


def local_sums_(
    logits: Float[Tensor, "n v"],
    maximum: Float[Tensor, " n"],
    rows: Int64[Tensor, " n"],
    owned: Bool[Tensor, " n"],
) -> Float[Tensor, "2 n"]:
    """This rank's part of ``sum_j exp(l_j - maximum)`` and of ``l_target - maximum``.

    ``logits`` become ``exp(l - maximum)`` in place.

    Args:
        maximum: The largest logit of each token over all ranks.
    """
    if not logits.shape[1]:
        return logits.new_zeros(2, logits.shape[0])
    target = (logits.gather(1, rows[:, None])[:, 0] - maximum).where(owned, 0)
    exponentials = logits.sub_(maximum[:, None]).exp_()
    return torch.stack((exponentials.sum(1), target))


def local_gradient_(
    exponentials: Float[Tensor, "n v"],
    total: Float[Tensor, " n"],
    rows: Int64[Tensor, " n"],
    owned: Bool[Tensor, " n"],
) -> Float[Tensor, "n v"]:
    """``total`` times the gradient of each token's loss by its logits: softmax minus one-hot, in place.

    Leaving the division by ``total`` to the caller, who can do it on the narrow side of the product with the weight,
    saves a pass over the logits.
    """
    if exponentials.shape[1]:
        exponentials.scatter_add_(1, rows[:, None], (total * -owned.to(total.dtype))[:, None])
    return exponentials


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first_row: int,
    chunk_rows: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> Tensor:
    """The loss of all tokens; fills the two gradients, where wanted, with those for an incoming gradient of 1."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = hidden.new_zeros((), dtype=wide)
    for start in range(0, hidden.shape[0], chunk_rows):
        chunk = slice(start, start + chunk_rows)
        x, target = hidden[chunk], targets[chunk]
        valid = target != IGNORE
        rows, owned = local_rows(target, first_row, weight.shape[0])
        logits = (x @ weight.t()).to(wide)
        maximum = reduce_max(local_max(logits))
        total, at_target = reduce_sum(local_sums_(logits, maximum, rows, owned)).unbind(0)
        loss += (total.log() - at_target).where(valid, 0).sum()
        if grad_hidden is None and grad_weight is None:
            continue
        gradient = local_gradient_(logits, total, rows, owned).to(hidden.dtype)
        factor = total.reciprocal().where(valid, 0)[:, None]
        if grad_hidden is not None:
            torch.mul(gradient @ weight, factor, out=grad_hidden[chunk])
        if grad_weight is not None:
            scaled = (x * factor).to(hidden.dtype)
            if grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(gradient.t(), scaled)
            else:
                grad_weight += gradient.t() @ scaled
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first_row: int,
        vocab_size: int,
        chunk_rows: int,
        reduce_max: Reduce,
        reduce_sum: Reduce,
        queue: WeightGradQueue | None,
        needs: tuple[bool, bool],
    ) -> Tensor:
        # Rows from vocab_size on are padding: left out, they have a logit of -inf and a gradient of 0.
        n_rows = min(max(vocab_size - first_row, 0), weight.shape[0])
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        loss = _forward(
            hidden,
            weight[:n_rows],
            targets,
            first_row,
            chunk_rows,
            reduce_max,
            reduce_sum,
            grad_hidden,
            None if grad_weight is None else grad_weight[:n_rows],
        )
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.parameter, ctx.queue = None if queue is None else weight, queue
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (grad,) = gradients
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad
        if grad_weight is not None and ctx.queue is not None:
            unscaled, grad_weight = grad_weight, None
            ctx.queue.push(ctx.parameter, lambda: unscaled * grad)
        elif grad_weight is not None:
            grad_weight = grad_weight * grad
        return grad_hidden, grad_weight, *[None] * 8


def chunked_cross_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int64[Tensor, " N"],
    *,
    first_row: int,
    vocab_size: int,
    chunk_rows: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
    queue: WeightGradQueue | None = None,
) -> Float[Tensor, ""]:
    """The summed cross-entropy of ``hidden @ weight.T`` over the vocabulary of all ranks, in float32 at least.

    Tokens whose target is ``IGNORE`` count nothing. Where gradients are wanted they are computed here, at about the
    cost of a backward, and backward only scales them: do not put this under activation recompute.

    States: over the axis that splits the vocabulary ``hidden`` is R (so its gradient, returned here, is P), ``weight``
    S(0), ``targets`` and the result I.

    Args:
        first_row: The vocabulary index of this rank's first row.
        vocab_size: Rows of the whole vocabulary; any further are padding, with a logit of -inf and a gradient of 0.
        chunk_rows: Tokens whose logits exist at a time.
        reduce_max: Maximum of an [n] tensor over the ranks; the identity on one. Called once a chunk.
        reduce_sum: Sum of a [2, n] tensor over the ranks, likewise.
        queue: Where the weight gradient waits; None returns it in backward.

    Raises:
        ValueError: with a queue, if ``weight`` is not a leaf.
        RuntimeError: if a target is neither ``IGNORE`` nor in the vocabulary; on CUDA asynchronously.
    """
    grads = torch.is_grad_enabled()
    needs = (grads and hidden.requires_grad, grads and weight.requires_grad)
    if queue is not None and needs[1]:
        require_leaf(weight)
    if targets.device.type != "meta":
        inside = (targets >= 0) & (targets < vocab_size) | (targets == IGNORE)
        torch._assert_async(inside.all(), "a target is outside the vocabulary")
    return _ChunkedCrossEntropy.apply(
        hidden, weight, targets, first_row, vocab_size, chunk_rows, reduce_max, reduce_sum, queue, needs
    )
