"""Attention of one rank's heads.

Letters: B rows of the batch, T queries, S keys, H query heads, G key and value heads, E query width, V value width.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Devices whose kernels give 0, and no NaN gradient, for a query that may attend no key. Some CUDA kernels give NaN.
_KEYLESS_IS_ZERO = ("cpu", "meta")


def document_mask(
    positions_q: Int[Tensor, "B T"],
    documents_q: Int[Tensor, "B T"],
    positions_k: Int[Tensor, "B S"],
    documents_k: Int[Tensor, "B S"],
) -> Bool[Tensor, "B T S"]:
    """True where a query may attend a key: same document, and not a later position in it."""
    same = documents_q[:, :, None] == documents_k[:, None, :]
    return same.logical_and_(positions_q[:, :, None] >= positions_k[:, None, :])


def attention(
    q: Float[Tensor, "B T H E"],
    k: Float[Tensor, "B S G E"],
    v: Float[Tensor, "B S G V"],
    *,
    scale: float,
    mask: Bool[Tensor, "B T S"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B T H V"]:
    """``softmax(scale * q k^T) v`` per head, by the fastest kernel that takes these shapes.

    Query head h reads key head ``h // (H / G)``. A query that may attend no key gives 0.

    Args:
        mask: True where a query may attend a key.
        causal: Query t attends keys 0 to t. Needs T = S and no ``mask``.

    Source: Vaswani 2017, arXiv 1706.03762; Ainslie 2023, arXiv 2305.13245 (grouped queries); Dao 2022, arXiv
    2205.14135 (the kernels' algorithm).
    """
    if causal and (mask is not None or q.shape[1] != k.shape[1]):
        raise ValueError(f"causal=True needs no mask and as many queries as keys (T={q.shape[1]}, S={k.shape[1]}).")
    width, value_width = q.shape[-1], v.shape[-1]
    grouped = q.shape[2] != k.shape[2]
    if grouped and mask is not None and q.device.type == "cuda":
        # No memory-saving CUDA kernel takes both a mask and grouped queries.
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
        grouped = False
    keyless = None
    if mask is not None and q.device.type not in _KEYLESS_IS_ZERO:
        keyless = ~mask.any(-1)
        mask = mask | keyless[..., None]  # such a query attends everything, and what it gets is dropped below
    if q.device.type == "cpu" and value_width != width:
        # The fused CPU kernel wants one width: zeros change no score, and add only zero columns to the result.
        pad = abs(width - value_width)
        if value_width < width:
            v = F.pad(v, (0, pad))
        else:
            q, k = F.pad(q, (0, pad)), F.pad(k, (0, pad))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    out = out.transpose(1, 2)[..., :value_width]
    return out if keyless is None else out.masked_fill(keyless[..., None, None], 0)
