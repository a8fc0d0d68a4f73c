"""Root-mean-square normalisation as a layer.

Letters: D width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ..mesh.run import Run
from ..ops.norm import rms_norm
from .base import Layer
from .init import ONES


class RMSNorm(Layer):
    """``x / sqrt(mean(x**2) + eps) * weight``.

    States: over ``tp`` the tokens are S(1) and the weight R: each rank's gradient is a part, and the parts are summed.
    """

    SHARDING = {"weight": (None,)}
    weight: nn.Parameter

    def __init__(self, run: Run, dim: int, eps: float) -> None:
        super().__init__(run)
        self.eps = eps
        self.declare("weight", (dim,), ONES)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return rms_norm(x, self.weight, self.eps)
