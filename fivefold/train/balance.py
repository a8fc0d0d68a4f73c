"""Expert load over all ranks: the routing biases move by it once a step, and the metrics show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.moe import MoE
from ..mesh.collectives import sum_values
from ..mesh.mesh import Mesh


@dataclass(frozen=True)
class Load:
    """What the experts of every layer saw in one step, over the whole batch."""

    counts: dict[str, Tensor]
    """Tokens that chose each expert, by layer ``[E]`` int64."""
    balance_loss: Tensor
    """Sum over layers of the balance loss, without its weight. Scalar."""
    z_loss: Tensor
    """Sum over layers of the router z-loss, without its weight. Scalar."""

    def imbalance(self) -> dict[str, float]:
        """Largest load over the mean, by layer; 1 is even."""
        return {name: float(c.max() * len(c) / c.sum().clamp(min=1)) for name, c in self.counts.items()}


def begin_counting(experts: Mapping[str, MoE]) -> None:
    """Start a new step's counts."""
    for moe in experts.values():
        moe.reset()


def update_balance(experts: Mapping[str, MoE], mesh: Mesh) -> Load:
    """Sum the step's counts over all ranks that hold other tokens, and move every layer's biases by them, once."""
    if not experts:
        zero = torch.zeros((), device=mesh.device)
        return Load({}, zero, zero)
    axis = mesh.join("ddp", "fsdp", "cp", "tp")
    layers = list(experts.items())
    counts = sum_values(torch.cat([moe.load for _, moe in layers]), axis).split([len(moe.load) for _, moe in layers])
    losses = sum_values(torch.stack([torch.stack([moe.balance_loss, moe.z_loss]) for _, moe in layers]), axis).sum(0)
    for (_, moe), load in zip(layers, counts, strict=True):
        moe.update_bias(load)
    return Load({name: load for (name, _), load in zip(layers, counts, strict=True)}, losses[0], losses[1])
