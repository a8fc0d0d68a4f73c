"""The layers' mathematics once more, token by token and head by head, as their papers write it. float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fivefold.config.model import MoeConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def turn(x: Tensor, position: int, theta: float, layout: str) -> Tensor:
    """One head's vector ``[R]`` at ``position``, pair by pair."""
    out, r = x.clone(), x.shape[0]
    for i in range(r // 2):
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + r // 2)
        angle = position * theta ** (-2 * i / r)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[a] * math.sin(angle) + x[b] * math.cos(angle)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float) -> Tensor:
    """One head of one row: queries, keys ``[T, E]``, values ``[T, V]``, causal inside each document."""
    rows = []
    for t in range(q.shape[0]):
        seen = [s for s in range(t + 1) if documents[s] == documents[t]]
        weights = torch.softmax(torch.stack([q[t] @ k[s] for s in seen]) * scale, 0)
        rows.append(sum(w * v[s] for w, s in zip(weights, seen, strict=True)))
    return torch.stack(rows)


def turn_all(x: Tensor, positions: Tensor, theta: float, layout: str) -> Tensor:
    """Every head's vector of one row ``[T, H, R]``."""
    turned = [[turn(h, int(at), theta, layout) for h in heads] for heads, at in zip(x, positions, strict=True)]
    return torch.stack([torch.stack(heads) for heads in turned])


def gqa(
    x: Tensor,
    p: Mapping[str, Tensor],
    width: int,
    theta: float,
    layout: str,
    positions: Tensor,
    documents: Tensor,
) -> Tensor:
    """One row ``[T, D]``."""
    q, k, v = ((x @ p[name].T).unflatten(-1, (-1, width)) for name in "qkv")
    q, k = (turn_all(y, positions, theta, layout) for y in (q, k))
    share = q.shape[1] // k.shape[1]
    heads = [attend(q[:, h], k[:, h // share], v[:, h // share], documents, width**-0.5) for h in range(q.shape[1])]
    return torch.cat(heads, -1) @ p["out"].T


def choose(scores: Tensor, bias: Tensor, c: MoeConfig) -> list[int]:
    """The experts of one token, best first."""
    biased = (scores + bias).tolist()
    size = c.n_experts // c.n_groups
    members = [range(g * size, (g + 1) * size) for g in range(c.n_groups)]
    best = 1 if c.group_score == "max" else 2
    strength = [sum(sorted((biased[e] for e in group), reverse=True)[:best]) for group in members]
    kept = sorted(range(c.n_groups), key=lambda g: (-strength[g], g))[: c.top_groups]
    allowed = [e for g in kept for e in members[g]]
    return sorted(allowed, key=lambda e: (-biased[e], e))[: c.top_k]


def moe(x: Tensor, p: Mapping[str, Tensor], bias: Tensor, c: MoeConfig) -> tuple[Tensor, list[list[int]], Tensor]:
    """Tokens ``[N, D]``: the result, each token's experts, and the router's logits."""
    logits = x @ p["router"].T
    rows, chosen = [], []
    for token, row in zip(x, logits, strict=True):
        scores = 1 / (1 + (-row).exp()) if c.score == "sigmoid" else row.exp() / row.exp().sum()
        experts = choose(scores, bias, c)
        total = sum(scores[e] for e in experts) if c.normalise else 1
        y = torch.zeros_like(token)
        for e in experts:
            weight, matrices = scores[e] / total * c.route_scale, (p["gate"][e], p["up"][e], p["down"][e])
            y = y + (swiglu(weight * token, *matrices) if c.score_before else weight * swiglu(token, *matrices))
        if c.n_shared:
            y = y + swiglu(token, p["shared.gate"], p["shared.up"], p["shared.down"])
        rows.append(y)
        chosen.append(experts)
    return torch.stack(rows), chosen, logits
