"""The gate of a SwiGLU feed-forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SwiGLU(torch.autograd.Function):
    """Keeps its two inputs and recomputes ``silu(gate)``: a third less memory than the two ops, and no slower."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        (grad,) = gradients
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def swiglu(gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``silu(gate) * up``, elementwise.

    Source: Shazeer 2020, arXiv 2002.05202.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the two ops and chooses what to keep
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)
