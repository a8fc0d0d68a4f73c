"""One matrix per expert, applied to rows sorted by expert.

Letters: N rows, E experts, K input width, F output width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.ops.linear import WeightGradQueue, require_leaf

_ALIGNMENT_BYTES = 16  # of every row and base address, required by F.grouped_mm


def _fused(left: Tensor, right: Tensor) -> bool:
    """True where ``F.grouped_mm`` takes these contiguous operands and is the faster choice.

    On CPU it has no float64, and its bfloat16 is far slower than a loop of matrix products.
    """
    if left.device.type == "cpu":
        dtypes = (torch.float32,)
    elif left.device.type == "cuda":
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
    else:
        return False
    if left.dtype not in dtypes or right.dtype != left.dtype or left.shape[0] == 0:
        return False
    if any(width * left.element_size() % _ALIGNMENT_BYTES for width in (left.shape[-1], right.shape[-1])):
        return False
    return all(t.is_contiguous() and t.data_ptr() % _ALIGNMENT_BYTES == 0 for t in (left, right))


def _counts(ends: Tensor, counts: list[int] | None) -> list[int]:
    """Rows of each expert on the host; waits for the device only if they are not there yet."""
    if counts is not None:
        return counts
    values: list[int] = ends.tolist()
    return [end - start for start, end in zip([0, *values[:-1]], values, strict=True)]


def _multiply(x: Tensor, weight: Tensor, ends: Tensor, counts: list[int] | None, transpose: bool) -> Tensor:
    """Rows of expert e times ``weight[e]``, transposed if asked: [N, K] or [N, F]."""
    if torch.compiler.is_compiling():
        return _multiply_op(x, weight, ends, transpose)
    matrices = weight.transpose(1, 2) if transpose else weight
    if x.device.type == "meta":
        return x.new_empty(x.shape[0], matrices.shape[2])
    if _fused(x, weight):
        return functional.grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(x.shape[0], matrices.shape[2])
    start = 0
    for expert, count in enumerate(_counts(ends, counts)):
        if count:
            torch.mm(x[start : start + count], matrices[expert], out=out[start : start + count])
        start += count
    return out


def _weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    """``grad.T @ x`` over the rows of each expert, exactly zero for an expert without rows: [E, F, K]."""
    if torch.compiler.is_compiling():
        return _weight_gradient_op(grad, x, ends)
    shape = (ends.shape[0], grad.shape[1], x.shape[1])
    if x.device.type == "meta":
        return x.new_empty(shape)
    if _fused(grad, x):
        out = functional.grouped_mm(grad.t(), x, offs=ends)
        # Some kernels leave an expert without rows as the memory was (pytorch/pytorch#172439).
        if counts is None:
            rows = torch.diff(ends, prepend=ends.new_zeros(1))
            return out.masked_fill_((rows == 0)[:, None, None], 0)
        for expert, count in enumerate(counts):
            if not count:
                out[expert].zero_()
        return out
    out = x.new_empty(shape)
    start = 0
    for expert, count in enumerate(_counts(ends, counts)):
        if count:
            rows = slice(start, start + count)
            torch.mm(grad[rows].t(), x[rows], out=out[expert])
        else:
            out[expert].zero_()
        start += count
    return out


# Opaque to torch.compile, which would stop at the loop, recompile for every list of counts, and whose own kernel for
# F.grouped_mm knows only bfloat16 and no addresses.
@torch.library.custom_op(
    "fivefold::grouped_multiply",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor ends, bool transpose) -> Tensor",
)
def _multiply_op(x: Tensor, weight: Tensor, ends: Tensor, transpose: bool) -> Tensor:
    return _multiply(x, weight, ends, None, transpose)


@_multiply_op.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, transpose: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transpose else 2])


@torch.library.custom_op(
    "fivefold::grouped_weight_gradient", mutates_args=(), schema="(Tensor grad, Tensor x, Tensor ends) -> Tensor"
)
def _weight_gradient_op(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return _weight_gradient(grad, x, ends, None)


@_weight_gradient_op.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        counts: list[int] | None,
        queue: WeightGradQueue | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        # Under checkpoint, saved tensors come back as detached copies: a gradient put on one would be lost.
        ctx.parameter, ctx.counts, ctx.queue = None if queue is None else weight, counts, queue
        return _multiply(x, weight, ends, counts, transpose=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors  # read once: under checkpoint, reading is the recompute
        counts, queue = ctx.counts, ctx.queue
        grad = gradients[0].contiguous()  # an expanded gradient (of a sum, say) has no rows of its own
        grad_x = _multiply(grad, weight, ends, counts, transpose=False) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if queue is None:
                grad_weight = _weight_gradient(grad, x, ends, counts)
            else:
                queue.push(ctx.parameter, lambda: _weight_gradient(grad, x, ends, counts))
        return grad_x, grad_weight, None, None, None


def grouped_linear(
    x: Float[Tensor, "N K"],
    weight: Float[Tensor, "E F K"],
    ends: Int32[Tensor, " E"],
    counts: list[int] | None = None,
    queue: WeightGradQueue | None = None,
) -> Float[Tensor, "N F"]:
    """``x[r] @ weight[e].T`` for every row r of every expert e, rows sorted by expert.

    Uses ``F.grouped_mm`` where device, dtype, alignment and layout allow it, else a product per expert.

    Args:
        ends: Cumulative row counts of the experts; the last is N. On the device of ``x``.
        counts: The row counts on the host, where they are known: saves a device synchronisation in the loop.
        queue: Where the weight gradient waits; None computes it in backward.

    Raises:
        ValueError: if ``counts`` do not add up to N, or, with a queue, if ``weight`` is not a leaf.
        RuntimeError: if ``ends[-1]`` is not N (rows past it would be left uninitialised); on CUDA asynchronously.
    """
    if counts is not None and sum(counts) != x.shape[0]:
        raise ValueError(f"counts add up to {sum(counts)}, but x has {x.shape[0]} rows (counts={counts}).")
    if x.device.type != "meta":
        torch._assert_async(ends[-1] == x.shape[0], "the last end is not the number of rows")
    if queue is not None and weight.requires_grad and torch.is_grad_enabled():
        require_leaf(weight)
    return _GroupedLinear.apply(x.contiguous(), weight, ends, counts, queue)
