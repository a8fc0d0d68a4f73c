"""The seam between attention and what holds a sequence: how queries meet all keys of their row.

Letters: B sequences, T tokens of a sequence on this rank, H query heads, G key and value heads, E query width, V value
width, L latent width, N width of a head's key without position, R rotary width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ...ops.linear import WeightGradQueue, linear
from ..microbatch import MicroBatch


@dataclass(frozen=True)
class Heads:
    """Keys ``[B, T, G, E]`` and values ``[B, T, G, V]`` of this rank's tokens; heads S(2) over ``tp``."""

    k: Tensor
    v: Tensor

    def expanded(self) -> Heads:
        return self


@dataclass(frozen=True)
class Latent:
    """What keys and values of this rank's tokens are expanded from: a latent, and a rotary key that all heads share.

    Over ``tp`` latent and key are R, and the heads that the weight makes of them S(2).
    """

    latent: Float[Tensor, "B T L"]
    key: Float[Tensor, "B T R"]
    weight: Float[Tensor, "HNV L"]
    nope_dim: int
    v_dim: int
    queue: WeightGradQueue | None = None

    def expanded(self) -> Heads:
        kv = linear(self.latent, self.weight, self.queue)
        return Heads(*expand(kv, self.key, self.nope_dim, self.v_dim))


KeyValues = Heads | Latent
"""Keys and values as a layer has them: a method that exchanges them expands them before or after."""


def expand(kv: Tensor, key: Tensor, nope_dim: int, v_dim: int) -> tuple[Tensor, Tensor]:
    """Keys ``[B, T, H, N+R]`` and values ``[B, T, H, V]`` from expanded latent ``[B, T, H*(N+V)]`` and shared key."""
    k_nope, v = kv.unflatten(-1, (-1, nope_dim + v_dim)).split([nope_dim, v_dim], -1)
    return torch.cat([k_nope, key[:, :, None].expand(-1, -1, k_nope.shape[2], -1)], -1), v


@runtime_checkable
class ContextAttention(Protocol):
    """Attention of this rank's queries over the whole of their sequences."""

    def prepare(self, mb: MicroBatch) -> None:
        """Derive what ``attend`` needs of ``mb`` and keep it in ``mb.cache``; ``attend`` does it if nobody has."""
        ...

    def attend(self, q: Float[Tensor, "B T H E"], kv: KeyValues, mb: MicroBatch,
               scale: float) -> Float[Tensor, "B T H V"]:  # fmt: skip
        """Causal attention inside each document; heads S(2) over ``tp``, tokens S(1) over ``cp``."""
        ...
