"""A linear map whose weight gradient can wait for the pipeline's W action.

Letters: I input width, O output width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

WeightGradJob = Callable[[], Tensor]


class WeightGradQueue:
    """Weight gradients not yet computed, first in first out.

    An op given a queue returns only its input gradient from backward (the I action) and leaves a job here. The owner
    takes the jobs of one backward with ``pop_all`` and runs them at once (B) or later (W); as both run the same jobs
    in the same order, their gradients are equal bit for bit.

    Source: Qi 2023, arXiv 2401.10241 (zero-bubble pipelines split backward into input and weight gradients).
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Tensor, WeightGradJob]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def push(self, parameter: Tensor, job: WeightGradJob) -> None:
        """Adds ``job``, which returns a gradient of ``parameter``."""
        self._jobs.append((parameter, job))

    def parameters(self) -> list[Tensor]:
        """Of which parameter each waiting job is a gradient."""
        return [parameter for parameter, _ in self._jobs]

    def pop_all(self) -> WeightGradQueue:
        """Moves every waiting job into a new queue."""
        taken = WeightGradQueue()
        self._jobs, taken._jobs = taken._jobs, self._jobs
        return taken

    def run(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields ``(parameter, gradient)`` job by job; a parameter used twice comes twice.

        A job leaves the queue as it runs, so the activations it held are free once its gradient is yielded.
        """
        while self._jobs:
            parameter, gradient = self._run_next()
            yield parameter, gradient
            del parameter, gradient

    @torch.no_grad()
    def _run_next(self) -> tuple[Tensor, Tensor]:
        parameter, job = self._jobs.popleft()
        return parameter, job()


def require_leaf(weight: Tensor) -> None:
    """Raises ValueError for a weight whose deferred gradient would have nowhere to go."""
    if not weight.is_leaf:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} is computed from another tensor (a cast, a view or a product), so"
            " a deferred gradient cannot reach its parameter. Pass the parameter itself, or queue=None."
        )


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Under checkpoint, saved tensors come back as detached copies: a gradient put on one would be lost.
        ctx.parameter, ctx.queue = weight, queue
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        x, weight = ctx.saved_tensors  # read once: under checkpoint, reading is the recompute
        rows = grad.reshape(-1, grad.shape[-1])
        ctx.queue.push(ctx.parameter, lambda: rows.t() @ x.reshape(-1, x.shape[-1]))
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def linear(
    x: Float[Tensor, "*rows I"],
    weight: Float[Tensor, "O I"],
    queue: WeightGradQueue | None = None,
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "*rows O"]:
    """``x @ weight.T + bias``, the weight gradient left in ``queue`` when there is one.

    Without a queue this is ``F.linear``, which compiles without a graph break. The bias gradient never waits.

    Raises:
        ValueError: with a queue, if ``weight`` is not a leaf.
    """
    if queue is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    require_leaf(weight)
    return _DeferredLinear.apply(x, weight, bias, queue)
