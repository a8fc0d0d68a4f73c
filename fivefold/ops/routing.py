"""A router's mathematics: scores, the choice of experts, their weights, the order of rows, and its losses.

Letters: N tokens, B rows of the batch, T positions, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

ScoreKind = Literal["sigmoid", "softmax"]
GroupScore = Literal["max", "top2_sum"]

_TINY = 1e-20  # keeps 0/0 out where every sigmoid underflows; DeepSeek-V3's released code adds the same


def scores(logits: Float[Tensor, "*tokens E"], kind: ScoreKind) -> Float[Tensor, "*tokens E"]:
    """Affinity of each token to each expert, in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.sigmoid() if kind == "sigmoid" else wide.softmax(-1)


def _largest(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, largest first, the lower index first among equals.

    ``torch.topk`` promises no order among equals. This is faster than a stable sort.
    """
    values, chosen = values.clone(), []
    for _ in range(k):
        chosen.append(values.argmax(-1, keepdim=True))  # of equals, argmax returns the first
        values.scatter_(-1, chosen[-1], -torch.inf)
    return torch.cat(chosen, -1)


@torch.no_grad()
def choose(
    scores: Float[Tensor, "N E"],
    bias: Float[Tensor, " E"] | None,
    top_k: int,
    n_groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "top2_sum",
) -> Int64[Tensor, "N {top_k}"]:
    """The ``top_k`` experts of each token with the largest biased score, from its ``top_groups`` best groups.

    The bias steers only this choice. Groups are contiguous and of equal size. Equal scores go to the lower index.

    Args:
        group_score: A group's score is its largest biased score ("max", DeepSeek-V2) or the sum of its two largest
            ("top2_sum", DeepSeek-V3).

    Source: DeepSeek-AI 2024, arXiv 2405.04434, section 2.2.2 (groups), and arXiv 2412.19437, section 2.1.2 (bias);
    their released routers.
    """
    n_experts = scores.shape[-1]
    if n_experts % n_groups or not 1 <= top_groups <= n_groups or top_k > n_experts // n_groups * top_groups:
        raise ValueError(
            f"top_k={top_k} experts cannot be chosen from top_groups={top_groups} of n_groups={n_groups} groups of"
            f" {n_experts} experts."
        )
    biased = scores if bias is None else scores + bias
    if top_groups < n_groups:
        groups = biased.unflatten(-1, (n_groups, -1))
        if group_score == "max":
            strength = groups.amax(-1)
        else:
            strength = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool).scatter_(-1, _largest(strength, top_groups), True)
        # Not 0: a biased score can be negative, and a dropped expert would then win.
        biased = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return _largest(biased, top_k)


def weights(
    scores: Float[Tensor, "N E"], indices: Int64[Tensor, "N K"], normalise: bool, scale: float
) -> Float[Tensor, "N K"]:
    """The unbiased scores of the chosen experts, divided by their sum if asked, times ``scale``."""
    chosen = scores.gather(-1, indices)
    if normalise:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _TINY)
    return chosen * scale if scale != 1 else chosen


def permutation(
    indices: Int64[Tensor, "N K"], n_experts: int
) -> tuple[Int64[Tensor, " NK"], Int64[Tensor, " {n_experts}"]]:
    """The order that sorts the flattened choices by expert, tokens ascending in each, and each expert's row count.

    ``order // K`` is the token of a sorted row. Never waits for the device.
    """
    expert, order = indices.flatten().sort(stable=True)
    bounds = torch.searchsorted(expert, torch.arange(n_experts + 1, device=expert.device))
    return order, bounds.diff()


@torch.no_grad()
def choice_counts(indices: Int64[Tensor, "B T K"], n_experts: int) -> Int64[Tensor, "B {n_experts}"]:
    """How many of this rank's tokens of each row chose each expert."""
    flat = indices.flatten(1)
    counts = flat.new_zeros(flat.shape[0], n_experts)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))


def balance_loss(
    scores: Float[Tensor, "B T E"], counts: Int[Tensor, "B E"], top_k: int, row_length: int
) -> Float[Tensor, ""]:
    """The sum over rows of ``sum_i f_i P_i``: 1 a row where every expert is chosen and scored alike.

    ``f_i = E / (K L) * counts_i`` is how often expert i was chosen in the row, without gradient, and ``P_i`` the mean
    over the row of its score, normalised over the experts.

    States: ``scores`` is this rank's part of every row and the result P over the axes that cut rows; ``counts`` is
    already summed over those axes.

    Args:
        row_length: L, the positions of a whole row, all ranks' together.

    Source: DeepSeek-AI 2024, arXiv 2412.19437, equations 17 to 20.
    """
    share = scores / (scores.sum(-1, keepdim=True) + _TINY)
    frequency = counts.to(scores.dtype) * (scores.shape[-1] / (top_k * row_length))
    return (frequency * share.sum(1)).sum() / row_length


def router_z_loss(logits: Float[Tensor, "*tokens E"]) -> Float[Tensor, ""]:
    """The sum over tokens of ``logsumexp(logits) ** 2``, in float32 at least; keeps a router's logits small.

    Source: Zoph 2022, arXiv 2202.08906, equation 5.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1).square().sum()
