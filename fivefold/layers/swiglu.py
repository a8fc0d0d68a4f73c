"""The gated feed-forward.

Letters: B sequences, T_tp tokens of a sequence on this rank's place of tp, D width, F hidden width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ..mesh.collectives import all_gather, reduce_scatter
from ..mesh.run import Run
from ..ops.linear import linear
from ..ops.swiglu import swiglu
from .base import Layer
from .init import InitRule


class SwiGLU(Layer):
    """``down(silu(gate(x)) * up(x))``, split over ``tp`` along F.

    Source: Shazeer 2020, arXiv 2002.05202; Korthikanti 2022, arXiv 2205.05198 (the two collectives).
    """

    SHARDING = {"gate": ("tp", None), "up": ("tp", None), "down": (None, "tp")}
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, run: Run, dim: int, hidden_dim: int, init: InitRule) -> None:
        super().__init__(run)
        self.declare("gate", (hidden_dim, dim), init.matrix(dim))
        self.declare("up", (hidden_dim, dim), init.matrix(dim))
        self.declare("down", (dim, hidden_dim), init.residual(hidden_dim))

    def forward(self, x: Float[Tensor, "B T_tp D"]) -> Float[Tensor, "B T_tp D"]:
        q = self.queue
        x = all_gather(x, self.tp, dim=1)  # S(1) -> R     [B, T, D]
        h = swiglu(linear(x, self.gate, q), linear(x, self.up, q))  # S(2)          [B, T, F/tp]
        y = linear(h, self.down, q)  # P             [B, T, D]
        return reduce_scatter(y, self.tp, dim=1)  # P -> S(1)     [B, T/tp, D]
