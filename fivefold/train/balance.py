"""Expert load over all ranks: the routing biases move by it once a step, and the metrics show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


def expert_layers(parts: Mapping[str, nn.Module]) -> dict[str, MoE]:
    """The expert layers of ``parts`` by name."""
    return {f"{part}.{name}".rstrip("."): m for part, module in parts.items()
            for name, m in module.named_modules() if isinstance(m, MoE)}  # fmt: skip


def begin_counting(experts: Mapping[str, MoE]) -> None:
    """Start a new step's counts."""
    for moe in experts.values():
        moe.reset()


def update_balance(experts: Mapping[str, MoE], layers: Mapping[str, int], mesh: Mesh) -> Load:
    """Sum the step's counts over all ranks that hold other tokens, and move every layer's biases by them, once.

    Args:
        experts: this rank's expert layers.
        layers: experts of every expert layer of the model: other stages' counts are known here too.
    """
    zero = torch.zeros((), device=mesh.device)
    if not layers:
        return Load({}, zero, zero)
    none = {name: torch.zeros(n, dtype=torch.int64, device=mesh.device) for name, n in layers.items()}
    loads = none | {name: moe.load for name, moe in experts.items()}
    own = [torch.stack([moe.balance_loss, moe.z_loss]) for moe in experts.values()]
    losses = torch.stack(own).sum(0) if own else zero.expand(2)
    # Counts and losses in one sum; float64 holds counts up to 2**53 exactly.
    parts = [losses.double(), *(loads[name].double() for name in layers)]
    losses, *counts = sum_values(torch.cat(parts), mesh.world).split([2, *layers.values()])
    by_layer = {name: count.long() for name, count in zip(layers, counts, strict=True)}
    for name, moe in experts.items():
        moe.update_bias(by_layer[name])
    return Load(by_layer, losses[0], losses[1])


def routing_biases(experts: Mapping[str, MoE], layers: Mapping[str, int], mesh: Mesh) -> dict[str, Tensor]:
    """The routing bias of every expert layer of the model, also those of other stages: ``[E]`` each."""
    none = {name: torch.zeros(n, device=mesh.device) for name, n in layers.items()}
    held = none | {name: moe.bias for name, moe in experts.items()}
    return {name: sum_values(held[name], mesh.pp) for name in layers}
