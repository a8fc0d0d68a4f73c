"""The last part: final norm, logits, loss; the vocabulary split over ``tp``.

Letters: B sequences, T tokens of a sequence, T_tp those of this rank's place of tp, D width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..mesh.collectives import all_gather, max_values, sum_values
from ..mesh.parameter import Init
from ..mesh.run import Run
from ..ops.cross_entropy import chunked_cross_entropy
from ..ops.linear import linear
from .base import Layer
from .microbatch import MicroBatch
from .norm import RMSNorm

CHUNK_LOGITS = 1 << 24
"""Logits that exist at once, at most, on a rank: 64 MiB in float32."""
CHUNK_ROWS = 1024
"""Tokens of a chunk, at least: each chunk adds to the whole weight gradient once, which few tokens would not repay."""


class Head(Layer):
    """Mean cross-entropy of the next token over the targets of the whole global batch, or logits without targets."""

    SHARDING = {"weight": ("tp", None)}
    recomputes = False  # the loss computes its gradients in the forward already
    weight: nn.Parameter

    def __init__(self, run: Run, vocab_size: int, dim: int, eps: float, init: Init) -> None:
        super().__init__(run)
        self.vocab_size = vocab_size
        self.norm = RMSNorm(run, dim, eps)
        self.declare("weight", (vocab_size, dim), init, pad=True, embedding=True)

    def forward(self, x: Float[Tensor, "B T_tp D"], mb: MicroBatch) -> Float[Tensor, ""] | Float[Tensor, "B T V"]:
        """The loss (float32 at least), P over ``ddp``, ``fsdp``, ``cp`` and I over ``tp``; or logits, I over ``tp``."""
        x = all_gather(self.norm(x), self.tp, dim=1)  # S(1) -> R     [B, T, D]
        if mb.targets is None:
            logits = linear(x, self.weight, self.queue)  # S(2)          [B, T, V/tp]
            return all_gather(logits, self.tp, dim=2, to="I")[..., : self.vocab_size]
        rows = self.weight.shape[0]
        loss = chunked_cross_entropy(
            x.flatten(0, 1),
            self.weight,
            mb.targets.flatten(),
            first_row=self.tp.rank * rows,
            vocab_size=self.vocab_size,
            chunk_rows=max(CHUNK_ROWS, CHUNK_LOGITS // rows),
            reduce_max=lambda values: max_values(values, self.tp),
            reduce_sum=lambda values: sum_values(values, self.tp),
            queue=self.queue,
        )
        # A batch without any target has a loss of 0, not 0/0.
        n = mb.n_targets
        return loss / (n.clamp(min=1) if isinstance(n, torch.Tensor) else max(n, 1))
