"""Root-mean-square normalisation.

Letters: D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """With ``n = x * r``: ``y = n * w``, ``dx = r * (g*w - n * mean(g*w*n))``, ``dw = sum(g*n)``.

    On CPU ``F.rms_norm`` is a chain of elementwise ops; this takes 0.4 of its time and saves only x and r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        grad, wide_weight = gradients[0].to(scale.dtype), weight.to(scale.dtype)
        normed = x * scale
        product = (grad * normed).reshape(-1, width)
        grad_weight = product.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        inner = torch.mv(product, wide_weight).view(scale.shape)
        grad_x = torch.mul(grad, wide_weight).addcmul_(normed, inner, value=-1 / width).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


def rms_norm(x: Float[Tensor, "*rows D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*rows D"]:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dim, computed in float32 at least.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)
    if x.dtype == weight.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)  # accumulates in float32 itself
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps).to(x.dtype)
