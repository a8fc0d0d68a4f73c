"""The global gradient norm, clipping, and what to do about a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..mesh.collectives import sum_values
from ..mesh.mesh import Mesh
from ..mesh.text import gather_text
from ..wrap.buffer import Shard


class NonFiniteGradient(FloatingPointError):
    """A gradient with an infinity or NaN in it; the step updated nothing."""


def gradients(shards: Sequence[Shard]) -> list[Tensor]:
    """The summed gradients of this rank's rows."""
    return [s.value.grad for s in shards if s.value.grad is not None]


def gradient_norm(shards: Sequence[Shard], mesh: Mesh) -> Tensor:
    """L2 norm of the whole gradient. float64, I on every rank.

    By the storage rule every element of a replica has one owner, so the squares are summed over ``pp, fsdp, cp, tp``;
    of a parameter that two stages share, one copy counts. A rank that stores no gradient does not know the others'
    dtype, so all sum in one.
    """
    counted = gradients([s for s in shards if s.original])
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if counted:
        wide = torch.promote_types(counted[0].dtype, torch.float32)
        total = torch.stack(torch._foreach_norm(counted, dtype=wide)).double().square().sum()
    return sum_values(total, mesh.join("pp", "fsdp", "cp", "tp")).sqrt()


def clip(shards: Sequence[Shard], norm: float, max_norm: float) -> None:
    """Scale the gradient down to ``max_norm`` if it is longer; 0 leaves it."""
    held = gradients(shards)
    if held and max_norm and norm > max_norm:
        torch._foreach_mul_(held, max_norm / norm)


def refuse_non_finite(shards: Sequence[Shard], norm: float, step: int, lr: float, mesh: Mesh) -> None:
    """Stop a step whose gradient norm is not finite, on every rank, with the first parameter that is to blame.

    Raises:
        NonFiniteGradient: on all ranks alike, before any update.
    """
    if math.isfinite(norm):
        return
    bad = next((s.piece.name for s in shards if s.value.grad is not None and not s.value.grad.isfinite().all()), "")
    names = gather_text(bad, mesh.world, mesh.device)
    where = next(((rank, name) for rank, name in enumerate(names) if name), None)
    found = f"rank {where[0]}, parameter {where[1]}" if where else "the sum of finite gradients overflows"
    raise NonFiniteGradient(
        f"the gradient norm is {norm} at step {step} ({found}); nothing was updated. "
        f"Lower optim.lr (now {lr:.3g}), raise optim.warmup_steps, or look at the step's data."
    )
