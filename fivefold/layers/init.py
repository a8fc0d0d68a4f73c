r"""How large initial weights are.

A matrix that reads a normalised vector ``x`` (entries of variance 1) gives ``y = W x`` the variance
:math:`\text{fan-in}\cdot\sigma^2`, so :math:`\sigma = 1/\sqrt{\text{fan-in}}` keeps it at 1, and by the same count the
gradients on the way back, whatever the width. That is the standard deviation of every matrix unless one is given.

The residual stream is a sum: each of L blocks writes to it twice, and independent writes add their variances. With
writes of variance v its variance grows to :math:`2Lv`, the first blocks' words drown, and later blocks, which read it
normalised, learn little. Dividing the matrices that write to it (the output of attention, the ``down`` of every
feed-forward and expert) by :math:`\sqrt{2L}` makes all writes together add v, at any depth.

A lookup reads one value, its token's: fan-in 1, so embeddings start with variance 1, as large as what all blocks will
write. (The demo's model on bytes of the standard library, batch 8, one seed each: 1.83 nats a byte after 220 steps,
against 1.92 with :math:`1/\sqrt{D}`.) As a head such rows would give logits :math:`\sqrt{D}` times too large, so a
matrix that is both starts as a head. The router reads a normalised vector: its logits start with variance 1. The normal
is cut at three standard deviations, which takes 1.3 % off the standard deviation; nobody corrects for it and neither do
we. Norms start at one.

Source: Glorot and Bengio 2010 (fan-in); Radford 2019, "Language models are unsupervised multitask learners", section
2.3 (depth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config.model import InitConfig
from ..mesh.parameter import Init

ONES = Init(kind="ones")


@dataclass(frozen=True, kw_only=True)
class InitRule:
    """Initial values of a model's matrices."""

    config: InitConfig
    n_layers: int

    def matrix(self, fan_in: int) -> Init:
        """A matrix that reads ``fan_in`` values."""
        return Init(std=self.config.std or fan_in**-0.5)

    def residual(self, fan_in: int) -> Init:
        """A matrix whose product is added to the residual stream."""
        depth = math.sqrt(2 * self.n_layers) if self.config.depth_scaling else 1.0
        return Init(std=(self.config.std or fan_in**-0.5) / depth)

    def embedding(self, dim: int, tied: bool) -> Init:
        """The embedding, whose fan-in is 1; if it is the head too, which reads ``dim`` values, it starts as a head."""
        return self.matrix(dim if tied else 1)
