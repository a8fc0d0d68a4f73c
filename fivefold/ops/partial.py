"""Attention over some of the keys, in a form that adds up over the rest, and its gradient.

The softmax over all keys is that over each part, weighted by the part's share of the sum of exponentials. So a part
gives its result and the logarithm of that sum, the *lse*, and :func:`merge_` adds parts up. Its gradient needs no more:
with the lse of all keys the kernels recompute the probabilities of the whole softmax in any part (``docs/context.md``).

Letters: B rows of the batch, T queries, S keys, H query heads, G key and value heads, E query width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
aten = torch.ops.aten

FLASH_WIDTH = 256
"""Widest head of the CUDA flash kernels."""
ALIGN = 8
"""The CUDA kernels' head widths are multiples of this."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What parts are added up in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def partial_attention(
    q: Float[Tensor, "B T H E"],
    k: Float[Tensor, "B S G E"],
    v: Float[Tensor, "B S G V"],
    *,
    scale: float,
    causal: bool = False,
    mask: Bool[Tensor, "B T S"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H T"]]:
    """Attention over these keys alone and its lse, both without gradient; query head h reads key head ``h // (H/G)``.

    Args:
        causal: query t attends keys 0 to t; needs T = S and no ``mask``.
        mask: true where a query may attend a key; every query needs one.

    Source: Milakov 2018, arXiv 1805.02867 (softmax in parts); Dao 2022, arXiv 2205.14135 (its lse).
    """
    forward, _ = _kernel(q, v, mask)
    out, lse = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, causal, mask)
    return out.transpose(1, 2), lse


def partial_attention_backward(
    grad: Float[Tensor, "B T H V"],
    q: Float[Tensor, "B T H E"],
    k: Float[Tensor, "B S G E"],
    v: Float[Tensor, "B S G V"],
    out: Float[Tensor, "B T H V"],
    lse: Float[Tensor, "B H T"],
    *,
    scale: float,
    causal: bool = False,
    mask: Bool[Tensor, "B T S"] | None = None,
) -> tuple[Float[Tensor, "B T H E"], Float[Tensor, "B S G E"], Float[Tensor, "B S G V"]]:
    """What these keys contribute to the gradient of q, and the gradients of k and v from these queries.

    Args:
        grad, out, lse: of the attention over all keys, of which these are some.
    """
    _, backward = _kernel(q, v, mask)
    heads_first = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    dq, dk, dv = backward(*heads_first, lse.contiguous(), scale, causal, mask)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def merge_(
    out: Float[Tensor, "B T H V"],
    lse: Float[Tensor, "B H T"],
    part: Float[Tensor, "B T H V"],
    part_lse: Float[Tensor, "B H T"],
) -> None:
    """Add a part to the attention over other keys, in place.

    With a, b the two lse, the result is ``(out e^a + part e^b) / (e^a + e^b)``, and its lse ``log(e^a + e^b)``.
    """
    total = torch.logaddexp(lse, part_lse)
    share = (part_lse - total).exp_().transpose(1, 2)[..., None]
    out.mul_((lse - total).exp_().transpose(1, 2)[..., None]).addcmul_(part.to(out.dtype), share.to(out.dtype))
    lse.copy_(total)


# ---- kernels: heads before tokens ------------------------------------------------------------------------------------


def _kernel(q: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Callable[..., tuple[Tensor, Tensor]],
                                                                Callable[..., Gradients]]:  # fmt: skip
    """The fastest forward and backward that take these tensors; masks come only with small parts."""
    if q.device.type == "cpu":
        return _cpu_forward, _cpu_backward
    if q.device.type == "cuda" and mask is None and q.dtype != torch.float64:
        half = q.dtype in (torch.bfloat16, torch.float16)
        if half and max(q.shape[-1], v.shape[-1]) <= FLASH_WIDTH and torch.cuda.get_device_capability(q.device)[0] >= 8:
            return _flash_forward, _flash_backward
        return _efficient_forward, _efficient_backward
    return _math_forward, _math_backward


def _to_width(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros up to ``width``: they change no score, and add only columns of zeros to a result."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)[:, None]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
                 ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The fused CPU kernel wants one width."""
    width, v_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *(_to_width(x, width) for x in (q, k, v)), 0.0, causal, attn_mask=_additive(mask, q.dtype), scale=scale
    )
    return out[..., :v_width], lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool,
                  mask: Tensor | None) -> Gradients:  # fmt: skip
    q_width, v_width = q.shape[-1], v.shape[-1]
    width = max(q_width, v_width)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_to_width(x, width) for x in (grad, q, k, v, out)), lse, 0.0, causal,
        attn_mask=_additive(mask, q.dtype), scale=scale)  # fmt: skip
    return dq[..., :q_width], dk[..., :q_width], dv[..., :v_width]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
                   ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The CUDA flash kernel wants one width too, and reads grouped heads itself."""
    width, v_width = _aligned(max(q.shape[-1], v.shape[-1])), v.shape[-1]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *(_to_width(x, width) for x in (q, k, v)), 0.0, causal, scale=scale)  # fmt: skip
    return out[..., :v_width], lse


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool,
                    mask: Tensor | None) -> Gradients:  # fmt: skip
    q_width, v_width = q.shape[-1], v.shape[-1]
    width = _aligned(max(q_width, v_width))
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        *(_to_width(x, width) for x in (grad, q, k, v, out)), lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
        no_dropout, no_dropout[:0], scale=scale)  # fmt: skip
    return dq[..., :q_width], dk[..., :q_width], dv[..., :v_width]


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
                       ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The CUDA memory-efficient kernel takes float32 and two widths, but no grouped heads; its lse is padded."""
    q_width, v_width = _aligned(q.shape[-1]), _aligned(v.shape[-1])
    k, v = _every_head(k, q.shape[1]), _every_head(v, q.shape[1])
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        _to_width(q, q_width), _to_width(k, q_width), _to_width(v, v_width), None, True, 0.0, causal, scale=scale
    )
    return out[..., : v.shape[-1]], lse[..., : q.shape[2]]


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
                        causal: bool, mask: Tensor | None) -> Gradients:  # fmt: skip
    q_width, v_width, groups = _aligned(q.shape[-1]), _aligned(v.shape[-1]), k.shape[1]
    whole_k, whole_v = _every_head(k, q.shape[1]), _every_head(v, q.shape[1])
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        _to_width(grad, v_width), _to_width(q, q_width), _to_width(whole_k, q_width), _to_width(whole_v, v_width), None,
        _to_width(out, v_width), lse, no_dropout, no_dropout, 0.0, [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]


def _aligned(width: int) -> int:
    return -(-width // ALIGN) * ALIGN


def _every_head(x: Tensor, heads: int) -> Tensor:
    """``[B, G, S, E]`` -> ``[B, H, S, E]``."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    scores = q @ _every_head(k, q.shape[1]).mT * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()[None]
    return scores if mask is None else scores.masked_fill(~mask[:, None], -torch.inf)


def _math_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
                  ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, for what no kernel takes."""
    scores = _scores(q.to(wide(q.dtype)), k.to(wide(q.dtype)), scale, causal, mask)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ _every_head(v, q.shape[1]), lse


def _math_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool,
                   mask: Tensor | None) -> Gradients:  # fmt: skip
    """``dS = P * (grad V^T - sum(grad * out))``, from which the rest follows."""
    dtype, groups = wide(q.dtype), k.shape[1]
    grad, q, k, v, out = (x.to(dtype) for x in (grad, q, k, v, out))
    p = (_scores(q, k, scale, causal, mask) - lse[..., None]).exp()
    ds = p * (grad @ _every_head(v, q.shape[1]).mT - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = ((x.mT @ y).unflatten(1, (groups, -1)).sum(2) for x, y in ((ds, q), (p, grad)))
    return ds @ _every_head(k, q.shape[1]), dk, dv
