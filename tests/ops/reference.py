"""Attention as it is defined, from the largest tensors there are."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The result ``[B, T, H, V]`` and the lse ``[B, H, T]`` for a mask ``[B, T, S]``."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = (torch.einsum("bthe,bshe->bhts", q, k) * scale).masked_fill(~mask[:, None], -torch.inf)
    return torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v), scores.exp().sum(-1).log()
