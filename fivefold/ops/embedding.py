"""A table of vectors read by row, whose gradient can wait for the pipeline's W action.

Letters: V rows of the table, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.ops.linear import WeightGradQueue, require_leaf


class _DeferredEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.parameter, ctx.queue = weight, queue
        return F.embedding(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        (rows,), (grad,) = ctx.saved_tensors, gradients
        n = ctx.parameter.shape[0]
        ctx.queue.push(ctx.parameter, lambda: torch.ops.aten.embedding_dense_backward(grad, rows, n, -1, False))
        return None, None, None


def embedding(
    rows: Int64[Tensor, "*shape"], weight: Float[Tensor, "V D"], queue: WeightGradQueue | None = None
) -> Float[Tensor, "*shape D"]:
    """``weight[rows]``, the weight gradient left in ``queue`` when there is one.

    Raises:
        ValueError: with a queue, if ``weight`` is not a leaf.
    """
    if queue is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return F.embedding(rows, weight)
    require_leaf(weight)
    return _DeferredEmbedding.apply(rows, weight, queue)
